"""Writing: waiting blocks get places in the open segment, in order, and are written there side by side.

write ──► waiting ──place in the open segment──► job: made and written ──► can be found, answered
             │
             └──there will be no room──► refused
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stepwell.tiers.base import Outgoing, Place, WriteDone, Writing
from stepwell.tiers.disk.calls import MAX_RUN, Placed, WriteCall
from stepwell.tiers.disk.directory.base import Directory
from stepwell.tiers.disk.segment import Segment
from stepwell.tiers.disk.stream import write_out


class Placing:
    """Writes blocks to one directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._waiting: deque[WriteCall] = deque()

    @property
    def waits(self) -> bool:
        """Some blocks have no place yet."""
        return bool(self._waiting)

    def add(self, blocks: Sequence[Outgoing], most: int, done: WriteDone) -> None:
        """Takes blocks to be written. Blocks of more than `most` bytes are TOO_LARGE."""
        answers = [Writing.TOO_LARGE] * len(blocks)
        call = WriteCall(deque((at, block) for at, block in enumerate(blocks) if block.nbytes <= most), answers, done)
        if call.ended:
            self._later(call)
            return
        self._waiting.append(call)
        self.go_on()

    def go_on(self) -> None:
        """Places waiting blocks as long as the open segment has room; else asks for another segment."""
        while self._waiting:
            call, segment = self._waiting[0], self._directory.open_segment
            placed: list[Placed] = []
            nbytes = 0
            while segment is not None and call.blocks:
                at, block = call.blocks[0]
                commitment = block.commit(segment.id)
                if not segment.fits(block.nbytes, commitment) or (placed and nbytes + block.nbytes > MAX_RUN):
                    break
                call.blocks.popleft()
                placed.append((at, block, *segment.take(block.nbytes, len(block.parts), commitment), commitment))
                nbytes += block.nbytes
            if segment is None or not placed:
                self._directory.begin()
                return
            if not call.blocks:
                self._waiting.popleft()
            self._submit(segment, placed, nbytes, call)
            self._directory.placed()

    def refuse(self, namespace: bytes = b"") -> None:
        """Refuses the waiting blocks: all, or those of one namespace."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.refuse(Writing.FULL, namespace)
            if call.blocks:
                self._waiting.append(call)
            elif call.ended:
                self._later(call)

    def _submit(self, segment: Segment, placed: list[Placed], nbytes: int, call: WriteCall) -> None:
        directory, shared = self._directory, self._directory.shared
        directory.use(segment)
        call.running += 1
        first = placed[0][2]

        def job() -> None:
            blocks = [(block, Place(segment.id, ordinal)) for _, block, _, ordinal, _ in placed]
            with directory.handles.use(segment.name) as file:
                write_out(file, first, blocks, shared.staging)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                directory.failed(segment, error)
            else:
                directory.space.wrote()
                shared.counts.device_bytes += nbytes
            for at, block, page, _, commitment in placed:
                stored = Writing.FAILED if error is not None else self._list(segment, block, page, commitment)
                call.answer(at, stored)
            call.running -= 1
            directory.ended(segment)
            if call.ended:
                call.finish()
            directory.wake()

        shared.executor.submit(job, ended)

    def _list(self, segment: Segment, block: Outgoing, page: int, commitment: bytes) -> Writing:
        """Makes a written block findable, if the index has room for it; the answer to its writer. The footer lists it
        in any case, since a sweep must miss nothing that lies in the segment. A block that was cleared while it was
        being written must not hide a newer copy of the same block."""
        index = self._directory.shared.index
        segment.codecs |= 1 << block.codec
        segment.record(block.id, block.namespace, page, block.nbytes, commitment, block.expires)
        if self._directory.is_leaving(segment, block.namespace) and index.find(block.id) is not None:
            return Writing.STORED
        try:
            index.put(block.id, segment.number, page)
        except OverflowError:
            return Writing.FULL
        return Writing.STORED

    def _later(self, call: WriteCall) -> None:
        """Answers the call, never from inside it."""
        self._directory.shared.executor.submit(lambda: None, lambda _: call.finish())
