"""Writing: blocks that wait get their places in the open segment, in order, and go there side by side.

write ──► waiting ──place in the open segment──► job: made and written ──► found from now on, answered
             │
             └──no room will come──► refused
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from stepwell.io.executor import Executor
from stepwell.io.staging import Staging
from stepwell.tiers.base import Outgoing, Place, TierCounts, WriteDone, Writing
from stepwell.tiers.disk.calls import MOST_RUN, Call, Placed
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.segment import Handles, Segment
from stepwell.tiers.disk.space import Space
from stepwell.tiers.disk.stream import write_out


class Owner(Protocol):
    """What placing needs of the directory whose open segment it fills."""

    handles: Handles
    space: Space

    @property
    def open_segment(self) -> Segment | None: ...

    def begin(self) -> None: ...

    def placed(self) -> None: ...

    def goes(self, segment: Segment, namespace: bytes) -> bool: ...

    def use(self, segment: Segment) -> None: ...

    def ended(self, segment: Segment) -> None: ...

    def failed(self, segment: Segment, error: BaseException) -> None: ...

    def wake(self) -> None: ...


class Placing:
    """Writes blocks to one directory."""

    def __init__(
        self, owner: Owner, index: BlockIndex, staging: Staging, executor: Executor, counts: TierCounts
    ) -> None:
        self._owner = owner
        self._index = index
        self._staging = staging
        self._executor = executor
        self._counts = counts
        self._waiting: deque[Call] = deque()

    @property
    def waits(self) -> bool:
        """There are blocks without a place."""
        return bool(self._waiting)

    def add(self, blocks: Sequence[Outgoing], most: int, done: WriteDone) -> None:
        """Blocks of more than `most` bytes would never fit."""
        answers = [Writing.TOO_LARGE] * len(blocks)
        call = Call(deque((at, block) for at, block in enumerate(blocks) if block.nbytes <= most), answers, done)
        if call.ended:
            self._later(call)
            return
        self._waiting.append(call)
        self.go_on()

    def go_on(self) -> None:
        """Gives waiting blocks their places, as long as there is an open segment with room."""
        while self._waiting:
            call, segment = self._waiting[0], self._owner.open_segment
            placed: list[Placed] = []
            nbytes = 0
            while segment is not None and call.blocks:
                at, block = call.blocks[0]
                commitment = block.commit(segment.id)
                if not segment.fits(block.nbytes, commitment) or (placed and nbytes + block.nbytes > MOST_RUN):
                    break
                call.blocks.popleft()
                placed.append((at, block, *segment.take(block.nbytes, len(block.parts), commitment), commitment))
                nbytes += block.nbytes
            if segment is None or not placed:
                self._owner.begin()
                return
            if not call.blocks:
                self._waiting.popleft()
            self._submit(segment, placed, nbytes, call)
            self._owner.placed()

    def refuse(self, namespace: bytes = b"") -> None:
        """Blocks that wait for a place get none: all, or those of one namespace."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.refuse(Writing.FULL, namespace)
            if call.blocks:
                self._waiting.append(call)
            elif call.ended:
                self._later(call)

    def _submit(self, segment: Segment, placed: list[Placed], nbytes: int, call: Call) -> None:
        self._owner.use(segment)
        call.running += 1
        first = placed[0][2]

        def job() -> None:
            blocks = [(block, Place(segment.id, ordinal)) for _, block, _, ordinal, _ in placed]
            with self._owner.handles.use(segment.name) as file:
                write_out(file, first, blocks, self._staging)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self._owner.failed(segment, error)
            else:
                self._owner.space.wrote()
                self._counts.device_bytes += nbytes
            for at, block, page, _, commitment in placed:
                stored = Writing.FAILED if error is not None else self._list(segment, block, page, commitment)
                call.answer(at, stored)
            call.running -= 1
            self._owner.ended(segment)
            if call.ended:
                call.finish()
            self._owner.wake()

        self._executor.submit(job, ended)

    def _list(self, segment: Segment, block: Outgoing, page: int, commitment: bytes) -> Writing:
        """A block that lies in the segment now can be found from now on, if the index has room for it. The footer has
        it anyway: it lists whatever can be found there, so that a sweep misses nothing. What was cleared on its way
        does not hide the same block that was written again since."""
        segment.record(block.id, block.namespace, page, block.nbytes, commitment, block.expires)
        if self._owner.goes(segment, block.namespace) and self._index.find(block.id) is not None:
            return Writing.STORED
        try:
            self._index.put(block.id, segment.number, page)
        except OverflowError:
            return Writing.FULL
        return Writing.STORED

    def _later(self, call: Call) -> None:
        """Never inside the call that asked."""
        self._executor.submit(lambda: None, lambda _: call.finish())
