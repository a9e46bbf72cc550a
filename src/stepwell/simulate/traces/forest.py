"""The prefixes of a trace as runs of blocks, cut only where requests were seen to part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepwell.simulate.traces.trace import Trace

Cost = Callable[[int, int], float]
"""Prefill seconds of prompt tokens [first, last)."""


class BlockRun:
    """Consecutive blocks of one prefix that have been used together so far: an `Item` of policies.

    `base`: where its ids begin in the trace's; `start`: its first block's position in the prompt; `children`: how many
    of its `kids`, the runs that continue it, are held; `left`: it was held, and has not been asked for since."""

    __slots__ = ("base", "children", "held", "kids", "left", "listed", "note", "parent", "seconds", "size", "start",
                 "used", "uses")  # fmt: skip

    def __init__(self, base: int, start: int, size: int, parent: BlockRun | None) -> None:
        self.base = base
        self.start = start
        self.size = size
        self.parent = parent
        self.kids: list[BlockRun] = []
        self.children = 0
        self.held = self.left = False
        self.seconds = 0.0
        self.uses = 0
        self.used = 0.0
        self.note: Any = None
        self.listed = 0

    @property
    def evictable(self) -> bool:
        return self.held and not self.children


class Forest:
    """Knows nothing of requests to come: a run that the future will cut is still one. `parted(head, tail)` is called
    after a run was cut."""

    def __init__(self, trace: Trace, cost: Cost, parted: Callable[[BlockRun, BlockRun], None]) -> None:
        self._ids = memoryview(trace.ids.data)
        self._tokens = trace.block_tokens
        self._cost = cost
        self._parted = parted
        self._heads: list[BlockRun | None] = [None] * trace.distinct  # by its first block's id

    def path(self, first: int, last: int) -> list[BlockRun]:
        """The runs that are together the ids [first, last) of the trace, whose prefix they are; new ones for what was
        never asked for."""
        runs: list[BlockRun] = []
        at = first
        parent: BlockRun | None = None
        while at < last:
            run = self._heads[self._ids[at]]
            if run is None:
                run = self._grow(at, at - first, last - at, parent)
            elif (same := self._same(run, at, last)) < run.size:
                self.cut(run, same)
            runs.append(run)
            at += run.size
            parent = run
        return runs

    def cut(self, run: BlockRun, size: int) -> BlockRun:
        """Leaves it `size` blocks and returns the rest, as a run of its own."""
        tail = BlockRun(run.base + size, run.start + size, run.size - size, run)
        run.size = size
        tail.kids, run.kids = run.kids, [tail]
        for kid in tail.kids:
            kid.parent = tail
        tail.children, run.children = run.children, int(run.held)
        tail.held, tail.left, tail.uses, tail.used, tail.note = run.held, run.left, run.uses, run.used, run.note
        self._heads[self._ids[tail.base]] = tail
        self._price(run)
        self._price(tail)
        self._parted(run, tail)
        return tail

    def _grow(self, base: int, start: int, size: int, parent: BlockRun | None) -> BlockRun:
        run = BlockRun(base, start, size, parent)
        if parent is not None:
            parent.kids.append(run)
        self._heads[self._ids[base]] = run
        self._price(run)
        return run

    def _price(self, run: BlockRun) -> None:
        run.seconds = self._cost(run.start * self._tokens, (run.start + run.size) * self._tokens)

    def _same(self, run: BlockRun, at: int, last: int) -> int:
        """Number of leading blocks of the run that equal the ids from `at` on: ids are chained, so if two are equal,
        all before them are."""
        ids, base = self._ids, run.base
        most = min(run.size, last - at)
        if ids[base + most - 1] == ids[at + most - 1]:
            return most
        least = 1
        while least < most:
            middle = (least + most) // 2
            if ids[base + middle] == ids[at + middle]:
                least = middle + 1
            else:
                most = middle
        return least
