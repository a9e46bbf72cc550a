"""Every store keeps the promises of `store/base.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from lab.rig.suite.amount import some_or_many
from stepwell.longctx.store import host
from stepwell.longctx.store.base import PageStore
from stepwell.longctx.store.disk import DiskFile
from stepwell.longctx.store.host import HostPool
from stepwell.longctx.store.link import ModelledLink, Throttled
from stepwell.longctx.store.tiers import Tiers

from .store_kit import PAGES, StoreMachine, check_shapes, pages

PAGE = 40


def host_pool(_: Path) -> PageStore:
    return HostPool(PAGE, PAGES * PAGE + PAGE - 1)


def small_extents(folder: Path) -> PageStore:
    return DiskFile(folder, PAGE, PAGES * PAGE + PAGE - 1, threads=2)


def aligned_extents(folder: Path) -> PageStore:
    """Past the page cache, where the filesystem of the tests can."""
    return DiskFile(folder, 4000, PAGES * 4096, threads=2)


def both(folder: Path) -> PageStore:
    """Five pages in host memory, then four and three on disks."""
    disk = [f"{folder}/{number}:{pages * PAGE}" for number, pages in enumerate((4, 3))]
    return Tiers(PAGE, 5 * PAGE, disk, threads=2)


def throttled(folder: Path) -> PageStore:
    return Throttled(both(folder), ModelledLink(1e9))


Make = Callable[[], PageStore]
MAKERS: dict[str, Callable[[Path], PageStore]] = {
    "host": host_pool,
    "disk": small_extents,
    "direct": aligned_extents,
    "tiers": both,
    "throttled": throttled,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return partial(MAKERS[request.param], tmp_path)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB", 5 * PAGE)


@some_or_many("examples", 12, 150)
def test_it_is_a_dict_of_pages(make: Make, examples: int) -> None:
    machine = type("Machine", (StoreMachine,), {"make": staticmethod(make)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))


def test_it_refuses_other_shapes(make: Make) -> None:
    with closing(make()) as store:
        check_shapes(store)


def test_it_takes_pages_that_are_not_side_by_side(make: Make) -> None:
    store = make()
    sliced = pages(4, 2 * store.page_bytes)[::2, 1::2]
    assert torch.equal(store.get(store.put(sliced)), sliced)
    store.close()


def test_threads_read_while_another_writes(make: Make) -> None:
    """Pages of one number each: whoever reads another one's bytes sees it."""
    store = make()
    kept = store.put(torch.arange(4, dtype=torch.uint8)[:, None].expand(4, store.page_bytes))
    order = torch.tensor([3, 0, 0, 2, 1])
    done, wrong = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            got = store.get(kept[order])
            if not torch.equal(got, order.to(torch.uint8)[:, None].expand(5, store.page_bytes)):
                wrong.append(got)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(80):
        places = store.put(torch.full((1 + number % 8, store.page_bytes), number % 256, dtype=torch.uint8))
        assert (store.get(places) == number % 256).all()
        store.free(places)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    store.close()


def test_the_system_has_no_memory_for_another_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostPool(PAGE, PAGES * PAGE)
    kept = pages(5, PAGE)
    places = store.put(kept)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", refuse)
        with pytest.raises(Exception, match=r"refused memory.*SW-209"):
            store.put(pages(1, PAGE))
    assert store.room == PAGES - 5
    assert torch.equal(store.get(places), kept)
    assert torch.equal(store.get(store.put(kept)), kept)


def refuse(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("not enough memory")


def test_hundreds_of_thousands_of_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffled over several slabs: the same bytes, in this order."""
    monkeypatch.setattr(host, "SLAB", 1 << 20)
    count = 300_000
    store = HostPool(PAGE, count * PAGE)
    content = torch.arange(count, dtype=torch.int64).view(torch.uint8).view(count, 8).repeat(1, PAGE // 8)
    places = store.put(content)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    assert torch.equal(store.get(places[order]), content[order])
    store.free(places[order[: count // 2]])
    again = store.put(content[: count // 2])
    assert torch.equal(store.get(again), content[: count // 2])
    assert torch.equal(store.get(places[order[count // 2 :]]), content[order[count // 2 :]])
