"""Where each byte of a page goes, and that two threads copy all of them once."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="pages are torch's tensors")

from stepwell.client.worker import Slot
from stepwell.engines.common.worker_half import WorkerHalf
from stepwell.engines.paged import cpu as cpu_module
from stepwell.engines.paged import team as team_module
from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.cpu import open_cpu
from stepwell.engines.paged.team import Copy, Team

PAGES, SLOTS, PAGE = 12, 8, 24  # PAGE: bytes in the first layer; the others have twice as many
LAYERS = {"a": slice(0, PAGE), "b": slice(PAGE, 3 * PAGE), "c": slice(3 * PAGE, 5 * PAGE)}
"""Where each layer lies in a page of a slot."""


def caches(seed: int) -> dict[str, torch.Tensor]:
    """The last two layers are evenly spaced in one buffer, as vLLM allocates them."""
    generator = torch.Generator().manual_seed(seed)
    first, others = (
        torch.randint(0, 256, (count, PAGES, size), dtype=torch.uint8, generator=generator)
        for count, size in ((1, PAGE), (2, 2 * PAGE))
    )
    return dict(zip(LAYERS, (*first, *others), strict=True))


def slab(pages_per_block: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (SLOTS, pages_per_block * 5 * PAGE), np.uint8)


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, list[int]]]]:
    """Pages in a block, and (slab, slot, skip, pages) without a page or a slot twice. Often evenly spaced."""
    per_block = draw(st.integers(1, 3))
    order = draw(st.permutations(range(PAGES)) | st.just(range(PAGES)) | st.just(range(PAGES - 1, -1, -1)))
    slots = draw(st.permutations(range(SLOTS)) | st.just(range(SLOTS)) | st.just(range(SLOTS - 1, -1, -1)))
    free, chosen = list(order), []
    for slot in list(slots)[: draw(st.integers(0, SLOTS))]:
        skip = draw(st.integers(0, per_block - 1))
        pages, free = free[: per_block - skip], free[per_block - skip :]
        chosen.append((draw(st.integers(0, 1)), slot, skip, pages))
    return per_block, chosen


@given(moves(), st.sampled_from([1, 4 * PAGE]))
def test_scatter_and_gather_equal_a_copy_page_by_page(
    plan: tuple[int, list[tuple[int, int, int, list[int]]]], piece_bytes: int
) -> None:
    per_block, chosen = plan
    slabs = [slab(per_block, 1), slab(per_block, 2)]
    tensors = caches(3)
    with patch.object(cpu_module, "PIECE_BYTES", piece_bytes):
        copies = open_cpu(tensors, PAGES)
    shards = [Shard(Slot(slabs[n], slot), skip, pages) for n, slot, skip, pages in chosen]
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for n, slot, skip, pages in chosen:
        for place, page in enumerate(pages, skip):
            whole = slabs[n][slot].reshape(per_block, -1)[place]
            for name, tensor in expected.items():
                tensor[page] = torch.from_numpy(whole[LAYERS[name]])
    with patch.object(team_module, "ALONE_BYTES", 0):
        copies.scatter(shards, copies.now())
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
        before = [one.copy() for one in slabs]
        whole = [shard for shard in shards if len(shard.pages) == per_block]
        for shard in whole:
            shard.slot.bytes[:] = 0
        copies.gather(whole, copies.now())
    assert all(np.array_equal(one, other) for one, other in zip(slabs, before, strict=True))
    copies.close()


@pytest.mark.parametrize(("piece_bytes", "calls"), [(4 * PAGE, 2), (4 * PAGE - 1, 3), (1, 3)])
def test_evenly_spaced_layers_of_a_page_are_copied_at_once(piece_bytes: int, calls: int) -> None:
    with patch.object(cpu_module, "PIECE_BYTES", piece_bytes):
        slots, copies = slab(2, 1), open_cpu(caches(1), PAGES)
    for copy in (copies.scatter, copies.gather):
        with patch.object(copies, "_team") as team:
            copy([Shard(Slot(slots, 3), 0, [7, 2])], copies.now())
        assert len(team.copy.call_args.args[0]) == 2 * calls


@pytest.mark.parametrize(
    ("slot", "skip", "pages"),
    [(SLOTS, 0, [1, 2]), (-1, 0, [1, 2]), (0, 0, [1, PAGES]), (0, 0, [-1, 1]), (0, 1, [1, 2]), (0, -1, [1, 2])],
)
def test_a_wrong_index_touches_nothing(slot: int, skip: int, pages: list[int]) -> None:
    slots, tensors = slab(2, 1), caches(2)
    before = slots.copy(), {name: tensor.clone() for name, tensor in tensors.items()}
    copies = open_cpu(tensors, PAGES)
    shards = [Shard(Slot(slots, 1), 0, [0, 3]), Shard(Slot(slots, slot), skip, pages)]
    for copy in (copies.scatter, copies.gather):
        with pytest.raises(IndexError):
            copy(shards, copies.now())
    assert np.array_equal(slots, before[0])
    assert all(torch.equal(tensors[name], before[1][name]) for name in tensors)


def test_what_does_not_fill_its_slot_is_not_gathered() -> None:
    """The rest of the slot would be published as this block's."""
    slots = slab(2, 1)
    before, copies = slots.copy(), open_cpu(caches(2), PAGES)
    for shard in (Shard(Slot(slots, 1), 0, [1]), Shard(Slot(slots, 1), 1, [1]), Shard(Slot(slots, 1), 0, [])):
        with pytest.raises(IndexError):
            copies.gather([Shard(Slot(slots, 0), 0, [2, 3]), shard], copies.now())
    assert np.array_equal(slots, before)


# the second thread ----------------------------------------------------------------------------------------------------


class Meeting:
    """An array whose filling waits until both threads are at one: fails unless two threads copy."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def __setitem__(self, key: object, value: object) -> None:
        self._barrier.wait(10)


LARGE = team_module.ALONE_BYTES + 1


def onto(target: Meeting, times: int) -> list[Copy]:
    return [Copy(target, np.zeros(1, np.uint8))] * times  # type: ignore[arg-type]


def pieces(target: Any, source: Any, size: int) -> list[Copy]:
    return [Copy(target[at : at + size], source[at : at + size]) for at in range(0, len(target), size)]


needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")


@needs_two
def test_large_copies_are_shared() -> None:
    team, barrier = Team(), threading.Barrier(2)
    for _ in range(3):
        team.copy(onto(Meeting(barrier), 2), LARGE)
    team.close()


@needs_two
def test_what_the_helper_raises_is_raised_here_when_nobody_copies_any_more() -> None:
    class Failing(Meeting):
        def __setitem__(self, key: object, value: object) -> None:
            super().__setitem__(key, value)
            if threading.current_thread().name.startswith("stepwell"):
                raise ValueError("on purpose")

    team, barrier = Team(), threading.Barrier(2)
    with pytest.raises(ValueError, match="on purpose"):
        team.copy(onto(Failing(barrier), 2), LARGE)
    team.copy(onto(Meeting(barrier), 2), LARGE)
    team.close()


@needs_two
def test_nobody_copies_any_more_when_the_first_thread_raises() -> None:
    late = threading.Event()

    class Failing(Meeting):
        def __setitem__(self, key: object, value: object) -> None:
            super().__setitem__(key, value)
            if not threading.current_thread().name.startswith("stepwell"):
                raise ValueError("on purpose")
            time.sleep(0.05)
            late.set()

    team = Team()
    with pytest.raises(ValueError, match="on purpose"):
        team.copy(onto(Failing(threading.Barrier(2)), 2), LARGE)
    assert late.is_set()
    team.close()


@needs_two
def test_an_error_of_the_helper_keeps_no_array_alive() -> None:
    class Failing(Meeting):
        def __setitem__(self, key: object, value: object) -> None:
            super().__setitem__(key, value)
            raise ValueError("on purpose")

    target = Failing(threading.Barrier(2))
    alive = weakref.ref(target)
    team = Team()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            team.copy(onto(target, 2), LARGE)
        del target
        assert alive() is None
    finally:
        gc.enable()
    team.close()


@needs_two
def test_the_helper_gets_the_processors_that_are_not_ours_now() -> None:
    team, given = Team(), []
    with patch.object(os, "sched_setaffinity", lambda thread, cpus: given.append((thread, cpus))):
        team.copy(onto(Meeting(threading.Barrier(2)), 2), LARGE)
    assert team._helper is not None
    ((thread, cpus),) = given
    assert thread == team._helper.native_id
    assert cpus and cpus < os.sched_getaffinity(0)
    team.close()


@needs_two
def test_a_closed_team_has_no_thread_and_touches_no_other() -> None:
    """The thread's number may be somebody else's by then."""
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    team = Team()
    team.copy(pieces(target, source, 1), LARGE)
    helper = team._helper
    assert helper is not None
    team.close()
    helper.join(10)
    assert not helper.is_alive()
    target[:] = 0
    with patch.object(os, "sched_setaffinity", side_effect=AssertionError("touched")):
        team.copy(pieces(target, source, 1), LARGE)
    assert np.array_equal(target, source)


def test_a_worker_half_ends_its_threads() -> None:
    work = WorkerHalf(0, 5 * PAGE, open_cpu(caches(1), PAGES), Mock())
    team = work._copies._team
    work.close()
    assert team._closed


@pytest.mark.parametrize("lacking", ["a second processor", "sched_getcpu", "threads"])
def test_one_thread_copies_all_where_there_is_no_other(lacking: str) -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copies = pieces(target, source, 1)
    team = Team()
    without = {
        "a second processor": patch.object(os, "sched_getaffinity", lambda _: {team_module._libc.sched_getcpu()}),
        "sched_getcpu": patch.object(team_module, "_libc", object()),
        "threads": patch.object(threading.Thread, "start", side_effect=RuntimeError("no more threads")),
    }
    with without[lacking]:
        team.copy(copies, LARGE)
    assert team._helper is None
    assert np.array_equal(target, source)
    team.close()


def test_several_threads_may_copy_at_once() -> None:
    rng = np.random.default_rng(5)
    sources = [rng.integers(0, 256, 1 << 16, np.uint8) for _ in range(4)]
    targets = [np.zeros(1 << 16, np.uint8) for _ in range(4)]
    team = Team()

    def run(source: Any, target: Any) -> None:
        for _ in range(50):
            target[:] = 0
            team.copy(pieces(target, source, 512), LARGE)
            assert np.array_equal(target, source)
        finished.release()

    finished = threading.Semaphore(0)
    for source, target in zip(sources, targets, strict=True):
        threading.Thread(target=run, args=(source, target), daemon=True).start()
    assert all(finished.acquire(timeout=30) for _ in sources)
    team.close()
