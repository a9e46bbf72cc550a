"""Stores that share a budget keep to it together, and give back what they do not need."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import BackendDown, CapacityError
from stepwell.longctx.store import host
from stepwell.longctx.store.budget import Bounds, Budget
from stepwell.longctx.store.disk import DiskFile
from stepwell.longctx.store.file import UnnamedFile
from stepwell.longctx.store.host import HostPool
from stepwell.longctx.store.tiers import Tiers
from stepwell.longctx.stores import Stores

from .store_kit import pages

PAGE = 40
Bounded = HostPool | DiskFile
STEPS = st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 9)), max_size=40)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB", 5 * PAGE)


def each(store: Bounded) -> int:
    """Bytes that a page of it takes."""
    return store.extent_bytes if isinstance(store, DiskFile) else store.page_bytes


def blocks(store: DiskFile) -> int:
    """Bytes that its file has on disk."""
    return os.fstat(store._file.fd).st_blocks * 512


@pytest.mark.parametrize("kind", ["host", "disk", "direct"])
def test_stores_of_one_budget_keep_to_it_together(kind: str) -> None:
    @given(limit=st.integers(0, 12), steps=STEPS)
    def check(limit: int, steps: list[tuple[int, bool, int]]) -> None:
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            budget = Budget(limit * (4096 if kind == "direct" else PAGE) + 13)
            sizes = (4000, 8192) if kind == "direct" else (PAGE, 56)
            stores: list[Bounded] = [
                HostPool(size, budget) if kind == "host" else DiskFile(folder, size, budget, threads=1)
                for size in sizes
            ]
            for store in stores:
                opened.callback(store.close)
            owned: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
            for which, putting, count in steps:
                store = stores[which]
                used = sum(len(places) * each(stores[one]) for one in (0, 1) for places, _ in owned[one])
                assert used <= budget.limit and budget.left == budget.limit - used
                assert [one.room for one in stores] == [budget.left // each(one) for one in stores]
                if not putting and owned[which]:
                    store.free(owned[which].pop(count % len(owned[which]))[0])
                elif putting and count * each(store) > budget.left:
                    with pytest.raises(CapacityError, match="SW-209"):
                        store.put(pages(count, store.page_bytes))
                elif putting:
                    content = pages(count, store.page_bytes)
                    owned[which].append((store.put(content), content))
            for store, held in zip(stores, owned, strict=True):
                assert all(torch.equal(store.get(places), content) for places, content in held)
                store.close()
            assert budget.left == budget.limit

    check()


def test_what_fails_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(10 * PAGE)
    with closing(HostPool(PAGE, budget)) as pool, closing(DiskFile(tmp_path, PAGE, budget)) as file:
        kept = pool.put(pages(4, PAGE))

        def refused(store: Bounded, kind: type[Exception]) -> None:
            with pytest.raises(kind):
                store.put(pages(3, PAGE))
            assert budget.left == 6 * PAGE and len(pool._slabs) == 1 and blocks(file) == 0

        for call, code, kind in (("write", errno.EIO, BackendDown), ("reserve", errno.ENOSPC, CapacityError)):
            with monkeypatch.context() as patched:
                patched.setattr(UnnamedFile, call, partial(fail, OSError(code, os.strerror(code))))
                refused(file, kind)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", partial(fail, RuntimeError("not enough memory")))
            refused(pool, CapacityError)
        with monkeypatch.context() as patched:
            patched.setattr(HostPool, "_scatter", partial(fail, RuntimeError("the device is lost")))
            refused(pool, RuntimeError)
        pool.free(kept)
        assert budget.left == budget.limit


def fail(error: Exception, *_: object, **__: object) -> None:
    raise error


def test_slabs_are_dropped_when_they_are_empty() -> None:
    with closing(HostPool(PAGE, 23 * PAGE)) as pool:
        places = pool.put(content := pages(23, PAGE))
        assert len(pool._slabs) == 5
        pool.free(places[5:10])
        pool.free(places[11:15])
        assert sorted(pool._slabs) == [0, 2, 3, 4]
        left = torch.cat([places[:5], places[10:11], places[15:]])
        assert torch.equal(pool.get(left), content[left])
        again = pool.put(content[:9])
        assert len(pool._slabs) == 5
        assert torch.equal(pool.get(again), content[:9]) and torch.equal(pool.get(left), content[left])
        pool.retain(again)
        pool.free(torch.cat([left, again]))
        assert 2 <= len(pool._slabs) <= 3  # those with the nine
        pool.free(again)
        assert not pool._slabs and pool._places.touched == 0


@pytest.mark.parametrize("page_bytes", [300, 4096])
def test_disk_space_is_given_back_when_no_page_is_left(tmp_path: Path, page_bytes: int) -> None:
    with closing(DiskFile(tmp_path, page_bytes, 4 << 20)) as file:
        content = pages(100, page_bytes)
        for _ in range(2):
            before = file._writes
            places = file.put(content)
            assert 100 * page_bytes <= blocks(file) <= 4 << 20
            file.free(places[1:])
            assert torch.equal(file.get(places[:1]), content[:1])
            file.free(places[:1])
            assert blocks(file) == 0
            assert file._writes == before + 100


def test_space_that_cannot_be_given_back_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(DiskFile(tmp_path, PAGE, 4 << 20)) as file:
        with monkeypatch.context() as patched:
            patched.setattr(UnnamedFile, "clear", partial(fail, OSError(errno.EIO, "failed")))
            file.free(file.put(pages(3, PAGE)))
        content = pages(4, PAGE)
        places = file.put(content)
        assert torch.equal(file.get(places), content)
        file.free(places)
        assert blocks(file) == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_threads_read_while_memory_comes_and_goes(tmp_path: Path, kind: str) -> None:
    """Each thread fills its pages with a number of its own; between two puts of one, the store may be empty."""
    budget = Budget(60 * PAGE)
    make: Callable[[int], Bounded] = (
        (lambda size: HostPool(size, budget))
        if kind == "host"
        else (lambda size: DiskFile(tmp_path, size, budget, threads=2))
    )
    stores = [make(PAGE), make(PAGE + 8)]
    wrong: list[object] = []

    def work(number: int) -> None:
        store = stores[number % 2]
        try:
            for turn in range(100):
                content = torch.full((1 + turn % 8, store.page_bytes), number, dtype=torch.uint8)
                places = store.put(content)
                if not torch.equal(store.get(places.flip(0)), content):
                    wrong.append(number)
                store.free(places)
        except Exception as error:  # noqa: BLE001 - told below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and budget.left == budget.limit
    for store in stores:
        store.close()


def test_a_reader_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are freed while they are read: it gets the bytes they had."""
    with closing(HostPool(PAGE, 20 * PAGE)) as pool:
        places = pool.put(content := pages(7, PAGE))
        gather = pool._gather

        def late(*given: object) -> None:
            pool.free(places)
            gather(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(pool, "_gather", late)
        assert torch.equal(pool.get(places), content) and not pool._slabs


def test_the_stores_of_a_cache_share_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a copy in a second, smaller size fits into a host tier that the first one nearly fills."""
    stores = Stores(10 * 4096, [f"{tmp_path}/a:8KiB", f"{tmp_path}/b:50%"], None)
    monkeypatch.setattr(os, "statvfs", partial(fail, AssertionError("asked again")))
    with closing(stores):
        first, second = stores.of(4096), stores.of(1024)
        places = first.put(pages(8, 4096))
        copy = second.put(content := pages(8, 1024))
        assert stores.bytes_by_tier() == {"host": 10 * 4096, "disk": 0}
        first.free(places)
        assert first.room == second.room // 4
        assert torch.equal(second.get(copy), content)
        assert stores.bytes_by_tier()["host"] == 8 * 1024


def test_tiers_within_the_same_bounds(tmp_path: Path) -> None:
    bounds = Bounds.of(3 * 4096, f"{tmp_path}:16KiB")
    with closing(Tiers(4096, bounds=bounds)) as one, closing(Tiers(1024, bounds=bounds)) as other:
        places = one.put(pages(5, 4096))
        assert (one.room, other.room) == (2, 8)
        other.put(pages(7, 1024))
        assert (one.room, other.room) == (0, 1)
        with pytest.raises(CapacityError, match="SW-209"):
            one.put(pages(1, 4096))
        one.free(places[:1])
        assert (one.room, other.room) == (1, 5)
    assert [bounds.host.left, *(budget.left for _, budget in bounds.disks)] == [3 * 4096, 16 << 10]  # type: ignore[union-attr]


def test_a_budget_is_no_debt() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        Budget(-1)
