"""What must wait for what, on a device that is late and does things in any order that it may."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="pages are torch's tensors")

import torch

from lab.rig.late_device import LateDevice
from stepwell.client.worker import Slot
from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.gpu.copies import Flight, GpuCopies
from stepwell.engines.paged.gpu.device import CopyMethod, Direction
from stepwell.engines.paged.pool import pool_of

LAYERS, PAGES, SIZE, PER_BLOCK, SLOTS = 2, 10, 48, 2, 6
WAYS = {Direction.OUT: CopyMethod.ENGINE, Direction.IN: CopyMethod.ENGINE}


class Gpu:
    """Pages, slots and copies; `pages` and `slots` as they are to be when everything is done."""

    def __init__(self, seed: int | None, *, beside: bool = False) -> None:
        whole = torch.zeros(PAGES * LAYERS * SIZE, dtype=torch.uint8)
        strides = (SIZE * LAYERS, SIZE) if beside else (SIZE, PAGES * SIZE)
        self.layers = [whole.as_strided((PAGES, SIZE), (strides[0], 1), layer * strides[1]) for layer in range(LAYERS)]
        self.device = LateDevice(seed)
        self.copies = GpuCopies(pool_of({str(n): t for n, t in enumerate(self.layers)}, PAGES), self.device, WAYS)
        self.slots = np.zeros((SLOTS, PER_BLOCK * LAYERS * SIZE), np.uint8)
        prepare = self.copies.prepare
        assert prepare is not None
        self.undo = prepare(self.slots)
        self.pages = np.zeros((PAGES, LAYERS * SIZE), np.uint8)

    def write(self, pages: list[int], value: int) -> None:
        """The engine's next step writes these pages."""

        def step() -> None:
            for layer in self.layers:
                layer[pages] = value

        self.copies.hold_back(pages)
        self.device.work(step)
        self.pages[pages] = value

    def now(self) -> np.ndarray[Any, Any]:
        """What is in the pages at present."""
        return np.concatenate([layer.numpy() for layer in self.layers], axis=1)

    def shard(self, slot: int, pages: list[int], skip: int = 0) -> Shard:
        return Shard(Slot(self.slots, slot), skip, pages)

    def content(self, pages: list[int]) -> np.ndarray[Any, Any]:
        return self.pages[pages].reshape(-1).copy()


SEEDS = [None, *range(20)]
"""How the device dallies; None: it does nothing that it need not."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gather_comes_after_the_work_that_it_is_told_of(seed: int | None) -> None:
    gpu = Gpu(seed)
    gpu.write([1, 2], 7)
    gpu.copies.gather([gpu.shard(0, [1, 2])], gpu.copies.now()).wait()
    assert (gpu.slots[0] == 7).all()


def test_and_does_not_wait_for_what_comes_later() -> None:
    """The forward that runs beside it may be a long one."""
    gpu = Gpu(None)
    before = gpu.copies.now()
    gpu.write([5], 9)
    gpu.copies.gather([gpu.shard(0, [1, 2])], before).wait()
    assert not gpu.now()[5].any(), "the step has not been done yet"


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_are_written_when_nobody_reads_them_any_more(seed: int | None) -> None:
    gpu = Gpu(seed)
    gpu.write([1, 2], 7)
    gathered = gpu.copies.gather([gpu.shard(0, [1, 2])], gpu.copies.now())
    gpu.write([2], 8)  # the request was preempted, and its page is another one's
    gpu.device.drain()
    gathered.wait()
    assert (gpu.slots[0] == 7).all() and (gpu.now()[2] == 8).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scatter_comes_after_the_gather_of_its_pages(seed: int | None) -> None:
    """A finished request's last blocks are spilled while its pages are another one's, to be loaded."""
    gpu = Gpu(seed)
    gpu.write([1, 2], 7)
    gpu.slots[1] = 5
    before = gpu.copies.now()
    gathered = gpu.copies.gather([gpu.shard(0, [1, 2])], before)
    gpu.copies.scatter([gpu.shard(1, [2, 3])], before).wait()
    gathered.wait()
    assert (gpu.slots[0] == 7).all() and (gpu.now()[[2, 3]] == 5).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scatter_comes_after_what_was_written_before(seed: int | None) -> None:
    """Pages may still be zeroed, or written by the step that their last request ended with."""
    gpu = Gpu(seed)
    gpu.slots[1] = 5
    gpu.write([2, 3], 9)
    gpu.copies.scatter([gpu.shard(1, [2, 3])], gpu.copies.now()).wait()
    gpu.device.drain()
    assert (gpu.now()[[2, 3]] == 5).all()


def test_where_the_device_refuses_to_hold_back_it_is_waited_for() -> None:
    gpu = Gpu(None)
    gpu.write([1, 2], 7)
    gathered = gpu.copies.gather([gpu.shard(0, [1, 2])], gpu.copies.now())
    gpu.device.refuses = 0
    gpu.copies.hold_back([2])
    assert gathered.ended.reached and (gpu.slots[0] == 7).all()  # type: ignore[attr-defined]


def test_pages_of_others_hold_nothing_back() -> None:
    gpu = Gpu(None)
    gpu.copies.gather([gpu.shard(0, [1, 2])], gpu.copies.now())
    gpu.write([3], 9)
    gpu.device.run_until(gpu.device.now())
    assert (gpu.now()[3] == 9).all() and gpu.device.copied_bytes == 0


def test_what_cannot_be_begun_leaves_nothing_under_way() -> None:
    gpu = Gpu(None)
    gpu.device.refuses = 0
    with pytest.raises(RuntimeError, match="on purpose"):
        gpu.copies.gather([gpu.shard(0, [1, 2])], gpu.copies.now())
    for wrong in (gpu.shard(0, [1]), gpu.shard(0, [1, PAGES]), gpu.shard(SLOTS, [1, 2])):
        with pytest.raises(IndexError):
            gpu.copies.gather([wrong], gpu.copies.now())
    assert not gpu.copies._flights


def test_a_fetch_is_in_memory_of_its_own() -> None:
    gpu = Gpu(3)
    gpu.write([4, 1], 6)
    fetched = gpu.copies.fetch([1, 4], gpu.copies.now())
    gpu.write([4], 1)
    fetched.copying.wait()
    assert fetched.bytes.shape == (2, LAYERS * SIZE) and (fetched.bytes == 6).all()
    with pytest.raises(IndexError):
        gpu.copies.fetch([PAGES], gpu.copies.now())


def test_memory_that_nobody_wants_any_more_is_kept_until_nobody_writes_it() -> None:
    """An allocator would give it to somebody else."""
    gpu = Gpu(None)
    gpu.write([1], 6)
    fetched = gpu.copies.fetch([1], gpu.copies.now()).bytes.base
    assert fetched is not None
    address, kept = fetched.ctypes.data, weakref.ref(fetched)
    gpu.device._reachable.clear()  # the device itself keeps no hold of it
    del fetched
    memory = kept()
    assert memory is not None
    gpu.device._reachable[address] = memory
    gpu.device.drain()
    assert (memory == 6).all() and not gpu.copies._touching([1])
    del memory
    gpu.device._reachable.clear()
    assert kept() is None


class Play:
    """An engine that keeps the rules, at random, beside a model of what it must lead to."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gpu = Gpu(seed, beside=self.rng.random() < 0.5)
        self.gathers: list[tuple[Flight, int, Any]] = []
        self.scatters: list[tuple[Flight, int, list[int]]] = []

    def idle_pages(self, count: int) -> list[int]:
        """Pages that are not being loaded."""
        loading = {page for _, _, pages in self.scatters for page in pages}
        return self.rng.sample([page for page in range(PAGES) if page not in loading], count)

    def slot(self) -> int | None:
        taken = {slot for _, slot, _ in [*self.gathers, *self.scatters]}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        return self.rng.choice(free) if free else None

    def turn(self) -> None:
        gpu, rng = self.gpu, self.rng
        match rng.randrange(6):
            case 0:
                gpu.write(self.idle_pages(rng.randrange(1, 4)), rng.randrange(256))
            case 1 if (slot := self.slot()) is not None:
                pages = self.idle_pages(PER_BLOCK)
                flight = gpu.copies.gather([gpu.shard(slot, pages)], gpu.copies.now())
                self.gathers.append((flight, slot, gpu.content(pages)))
            case 2 if (slot := self.slot()) is not None and len(self.scatters) < 2:
                skip = rng.randrange(PER_BLOCK)
                pages = self.idle_pages(PER_BLOCK - skip)
                gpu.slots[slot] = rng.randbytes(1)[0]
                flight = gpu.copies.scatter([gpu.shard(slot, pages, skip)], gpu.copies.now())
                gpu.pages[pages] = gpu.slots[slot, 0]
                self.scatters.append((flight, slot, pages))
            case 3 if self.gathers:
                self.end_gather(rng.randrange(len(self.gathers)))
            case 4 if self.scatters:
                self.end_scatter(rng.randrange(len(self.scatters)))
            case _:
                gpu.device.idle()

    def end_gather(self, number: int) -> None:
        flight, slot, expected = self.gathers.pop(number)
        flight.wait()
        assert np.array_equal(self.gpu.slots[slot], expected)

    def end_scatter(self, number: int) -> None:
        flight, _, pages = self.scatters.pop(number)
        flight.wait()
        assert np.array_equal(self.gpu.now()[pages], self.gpu.pages[pages])

    def end(self) -> None:
        while self.gathers:
            self.end_gather(0)
        while self.scatters:
            self.end_scatter(0)
        self.gpu.device.drain()
        assert np.array_equal(self.gpu.now(), self.gpu.pages)
        assert not self.gpu.copies._touching(range(PAGES))
        self.gpu.undo()


@given(st.integers(0, 1 << 30))
def test_any_order_leads_to_what_was_meant(seed: int) -> None:
    play = Play(seed)
    for _ in range(60):
        play.turn()
    play.end()
