"""The smallest tier that keeps its promises: a dict of bytes. The kit is proven on it; other tests put it where a tier
is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from stepwell.block.namespace import BlockId
from stepwell.io.executor import Executor
from stepwell.tiers.base import (
    Capacity,
    Forgotten,
    Incoming,
    Outgoing,
    Place,
    ReadDone,
    Reading,
    TierCounts,
    WriteDone,
    Writing,
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A block's frames, and the segment that they were made for."""

    frames: bytes
    segment: bytes
    namespace: bytes = b""


class DictTier:
    """A tier of at most `limit` bytes that evicts the oldest writes first. `left`: content left by an earlier life.
    Reads and writes are jobs of the executor; `reads` counts blocks that were read."""

    name = "dict"

    def __init__(self, limit: int, executor: Executor, left: dict[BlockId, Kept] | None = None) -> None:
        self.counts = TierCounts()
        self.blocks: dict[BlockId, Kept] = {}
        self.reads = 0
        self._left = left or {}
        self._limit = limit
        self._executor = executor
        self._ordinal = 0
        self._cleared = 0  # how often
        self._numbers = count(1)
        self._reading: set[int] = set()  # numbers of calls
        self._clears: list[tuple[set[int], Callable[[], None]]] = []
        self._segment = os.urandom(16)  # another one in each life

    def lookup(self, id: BlockId) -> bool:
        return id in self.blocks

    def touch(self, id: BlockId) -> None:
        pass  # it keeps blocks in the order in which they were written

    def read(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        known = [self.blocks.get(block.id) for block in blocks]
        answers = [Reading.ABSENT] * len(blocks)
        self.reads += len(blocks)
        number = next(self._numbers)
        self._reading.add(number)

        def job() -> None:
            for at, (block, kept) in enumerate(zip(blocks, known, strict=True)):
                if kept is not None:
                    fits = len(kept.frames) == block.nbytes
                    answers[at] = _open(block, kept) if fits else Reading.DAMAGED

        def ended(error: BaseException | None) -> None:
            for at, block in enumerate(blocks):
                if error is not None:
                    answers[at] = Reading.FAILED
                elif answers[at] in (Reading.ABSENT, Reading.DAMAGED):
                    self.drop(block.id)
            self._reading.discard(number)
            done(answers)
            self._end_clears()

        self._executor.submit(job, ended)

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        made: list[bytes] = []
        cleared = self._cleared
        places = []
        for block in blocks:
            places.append(Place(self._segment, self._ordinal))
            self._ordinal += len(block.parts)

        def job() -> None:
            for block, place in zip(blocks, places, strict=True):
                parts = [np.empty(nbytes, np.uint8) for nbytes in block.parts]
                for part, frame in enumerate(parts):
                    block.make(part, frame, place)
                made.append(b"".join(part.tobytes() for part in parts))

        def ended(error: BaseException | None) -> None:
            if error is not None or cleared != self._cleared:  # what was asked for before a clear comes to nothing
                done([Writing.FULL if error is None else Writing.FAILED] * len(blocks))
                return
            done([self._keep(block, frames) for block, frames in zip(blocks, made, strict=True)])

        self._executor.submit(job, ended)

    def _keep(self, block: Outgoing, frames: bytes) -> Writing:
        self.drop(block.id)
        if len(frames) > self._limit:
            return Writing.TOO_LARGE
        while self._used + len(frames) > self._limit:
            self.drop(next(iter(self.blocks)))
            self.counts.evicted_blocks += 1
        self.blocks[block.id] = Kept(frames, self._segment, block.namespace)
        self.counts.device_bytes += len(frames)
        return Writing.STORED

    def drop(self, id: BlockId) -> None:
        self.blocks.pop(id, None)

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        self._cleared += 1
        used, all = self._used, len(self.blocks)
        for id in [id for id, kept in self.blocks.items() if namespace in (b"", kept.namespace)]:
            self.drop(id)
        forgotten = Forgotten(all - len(self.blocks), used - self._used)
        self._clears.append((set(self._reading), lambda: done(forgotten)))
        self._executor.submit(lambda: None, lambda _: self._end_clears())

    def _end_clears(self) -> None:
        """A clear has ended when the reads have that were under way when it came."""
        clears, self._clears = self._clears, []
        for reading, done in clears:
            if reading & self._reading:
                self._clears.append((reading, done))
            else:
                done()

    @property
    def _used(self) -> int:
        return sum(len(kept.frames) for kept in self.blocks.values())

    def capacity(self) -> Capacity:
        return Capacity(self._used, self._limit)

    def figures(self) -> dict[str, int]:
        return {"blocks": len(self.blocks)}

    def recover(self, done: Callable[[int], None]) -> None:
        def ended(_: BaseException | None) -> None:
            left = {id: kept for id, kept in self._left.items() if id not in self.blocks}
            for id, kept in left.items():
                if self._used + len(kept.frames) <= self._limit:
                    self.blocks[id] = kept
            done(len(left))

        self._executor.submit(lambda: None, ended)

    def settle(self, done: Callable[[], None]) -> None:
        self._executor.submit(lambda: None, lambda _: done())

    def close(self) -> None:
        pass


def _open(block: Incoming, kept: Kept) -> Reading:
    at = 0
    try:
        for part, nbytes in enumerate(block.parts):
            frame = np.frombuffer(bytearray(kept.frames[at : at + nbytes]), np.uint8)
            answer = block.open(part, frame, kept.segment)
            if answer is not Reading.GOOD:
                block.fail()
                return answer
            at += nbytes
    except BaseException:
        block.fail()
        raise
    return Reading.GOOD
