"""One directory of the disk tier: its segments, which one is written, and how room is made.

Everything but the jobs happens on the owner's thread. A segment's life:

    file created, or free ──head written──► OPEN ──full──► CLOSING ──footer──► CLOSED ──hot blocks copied──► FREE
                                              └── a write failed: closed without a footer

Bounds: files of ours never exceed `limit` bytes; no file is made, and none is used again, where that leaves others less
than `reserve` bytes of free space; then a file that became free is unlinked instead.
"""

from __future__ import annotations

import errno
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np

from stepwell.block.frame import PAGE
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.files import Files
from stepwell.io.staging import Staging
from stepwell.tiers.base import Locksmith, Outgoing, Place, Reading, TierCounts, WriteDone, Writing
from stepwell.tiers.disk.eviction import Eviction
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.layout import Footer, Head
from stepwell.tiers.disk.segment import Handles, Phase, Placed, Run, Segment

MOST_IO = 8 << 20
"""Bytes of one I/O, unless one block alone is larger."""

EVICT_AHEAD = 0.25
"""Share of the open segment that is still free when room is made for the next: hot blocks go in there."""

FULL_S = 5.0
"""How long a directory that had no room is not asked for more."""

MOST_OPEN = 512
SUFFIX = ".seg"


class NoRoom(OSError):
    """Taking this space would leave others less than the reserve."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "it would take the free space that is reserved for others")


class Directory:
    """`numbers` are shared by all directories of a tier: a segment's number is the tier's name for it. `changed` is
    called whenever something has ended."""

    def __init__(
        self,
        files: Files,
        *,
        limit: int,
        reserve: int,
        segment_bytes: int,
        index: BlockIndex,
        segments: dict[int, tuple[Directory, Segment]],
        numbers: count[int],
        staging: Staging,
        executor: Executor,
        clock: Clock,
        wall: Callable[[], float],
        locksmith: Locksmith,
        counts: TierCounts,
        trouble: Callable[[str, BaseException], None],
        changed: Callable[[], None],
    ) -> None:
        self.limit = limit
        self.used = 0
        self.files = files
        self.handles = Handles(files, MOST_OPEN)
        self._reserve = reserve
        self._segment_bytes = segment_bytes
        self._index = index
        self._all = segments
        self._numbers = numbers
        self._staging = staging
        self._executor = executor
        self._clock = clock
        self._wall = wall
        self._counts = counts
        self._trouble = trouble
        self._changed = changed
        self.segments: dict[int, Segment] = {}
        self.open_segment: Segment | None = None
        self._eviction = Eviction(self, index, staging, executor, locksmith, counts)
        self._free: deque[Segment] = deque()
        self._beginning = False  # a segment is being made ready
        self._full_until = 0.0
        self._sequence = 0
        self._waiting: deque[tuple[deque[tuple[int, Outgoing]], list[Writing], WriteDone]] = deque()
        self.ready = False  # what lies here is known
        self.unreadable = False  # it could not be found out

    # reading ----------------------------------------------------------------------------------------------------------

    def read(self, run: Run) -> Callable[[list[Reading]], None]:
        """A job that reads the run and writes its answers into the list that it is given. Call `ended` after it."""
        segment, id = run.segment, run.segment.id
        segment.busy += 1

        def job(answers: list[Reading]) -> None:
            try:
                with self._staging.lend(run.nbytes) as buffer, self.handles.use(segment.name) as file:
                    got = file.read(buffer[: run.nbytes], run.page * PAGE)
                    at = 0
                    for place, block in run.blocks:
                        end = at + block.nbytes
                        answers[place] = block.open(buffer[at:end], id) if end <= got else Reading.DAMAGED
                        at = end
            except FileNotFoundError:
                for place, _ in run.blocks:
                    answers[place] = Reading.DAMAGED
            except OSError as error:
                self._trouble("read", error)
                for place, _ in run.blocks:
                    answers[place] = Reading.FAILED

        return job

    def ended(self, segment: Segment) -> None:
        """A job that used the segment has ended."""
        segment.busy -= 1
        if segment.busy:
            return
        if segment.phase is Phase.CLOSING:
            self._finish(segment)
        elif segment.phase is Phase.DOOMED:
            self._unlink(segment)

    def wake(self) -> None:
        """Something has ended that those who wait for room, or for quiet, may have waited for."""
        if self._waiting:
            self._place()
        self._changed()

    # writing ----------------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        answers = [Writing.TOO_LARGE] * len(blocks)
        most = self._segment_bytes - PAGE - Footer.nbytes(1)
        fitting = deque((at, block) for at, block in enumerate(blocks) if block.nbytes <= most)
        if not fitting:
            self._later(lambda: done(answers))
            return
        self._waiting.append((fitting, answers, done))
        self._place()

    def _place(self) -> None:
        """Gives waiting blocks their places, as long as there is an open segment with room."""
        while self._waiting:
            blocks, answers, done = self._waiting[0]
            segment = self.open_segment
            placed: list[tuple[int, Placed]] = []
            nbytes = 0
            while segment is not None and blocks:
                at, block = blocks[0]
                commitment = block.commit(segment.id)
                if not segment.fits(block.nbytes, commitment) or (placed and nbytes + block.nbytes > MOST_IO):
                    break
                blocks.popleft()
                page, ordinal = segment.take(block.nbytes, block.frames, commitment)
                placed.append((at, (block, page, ordinal, commitment)))
                nbytes += block.nbytes
            if segment is not None and placed:
                if not blocks:
                    self._waiting.popleft()
                self._submit_write(segment, placed, nbytes, answers, last=not blocks, done=done)
                self._make_room_ahead()
            elif not self._begin():
                return

    def _submit_write(
        self, segment: Segment, placed: list[tuple[int, Placed]], nbytes: int, answers: list[Writing], *, last: bool,
        done: WriteDone,
    ) -> None:  # fmt: skip
        segment.busy += 1
        first = placed[0][1][1]

        def job() -> None:
            with self._staging.lend(nbytes) as buffer:
                at = 0
                for _, (block, _, ordinal, _) in placed:
                    block.make(buffer[at : at + block.nbytes], Place(segment.id, ordinal))
                    at += block.nbytes
                with self.handles.use(segment.name) as file:
                    file.write(buffer[:nbytes], first * PAGE)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self.failed(segment, error)
            else:
                self._counts.device_bytes += nbytes
            for at, (block, page, _, commitment) in placed:
                answers[at] = Writing.STORED if error is None else Writing.FAILED
                if error is None:
                    self._index.put(block.id, segment.number, page)
                    segment.record(block.id, block.namespace, page, block.nbytes, commitment, block.expires)
            self.ended(segment)
            if last:
                done(answers)
            self.wake()

        self._executor.submit(job, ended)

    def failed(self, segment: Segment, error: BaseException) -> None:
        """A write to it failed: what is on the device now nobody knows, so nothing more is placed in it. What was
        written before stays readable: each frame proves itself."""
        self._trouble("write", error)
        if segment is self.open_segment:
            self.open_segment = None
        if segment.phase is Phase.OPEN:
            segment.phase = Phase.CLOSING

    def _close_open(self) -> None:
        segment, self.open_segment = self.open_segment, None
        if segment is not None:
            segment.phase = Phase.CLOSING
            segment.busy += 1  # so that what follows happens once, here or when its last job ends
            self.ended(segment)

    def _finish(self, segment: Segment) -> None:
        """All its jobs have ended: the footer is written."""
        segment.phase = Phase.CLOSED
        if not segment.records:
            self._free_up(segment)
            return
        footer = segment.footer()
        segment.records, segment.commitments = [], {}
        self._write_footer(segment, footer)

    def close_found(self, segment: Segment, footer: Footer) -> None:
        """Writes the footer of a segment that an earlier life left open, so that the next one finds it."""
        if len(footer.records) and Footer.nbytes(len(footer.records)) <= self._unused_end(segment, footer):
            self._write_footer(segment, footer)

    @staticmethod
    def _unused_end(segment: Segment, footer: Footer) -> int:
        last = footer.records[-1]
        return segment.nbytes - (int(last["page"]) + int(last["pages"])) * PAGE

    def _write_footer(self, segment: Segment, footer: Footer) -> None:
        raw = footer.pack()
        segment.busy += 1

        def job() -> None:
            with self._staging.lend(len(raw)) as buffer, self.handles.use(segment.name) as file:
                buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
                file.write(buffer[: len(raw)], segment.nbytes - len(raw))

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self._trouble("write", error)
            else:
                self._counts.device_bytes += len(raw)
            self.ended(segment)
            self.wake()

        self._executor.submit(job, ended)

    # making room ------------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Sees to it that there will be an open segment with room. False: not at once, or not now (then those who wait
        have been told)."""
        if not self._beginning:
            self._close_open()
            if self.unreadable:
                self._refuse()
            if not self.ready:
                return False
            if self._free:
                self._prepare(self._free.popleft(), create=False)
            elif self._may_grow:
                self.used += self._segment_bytes
                name = f"{secrets.token_hex(8)}{SUFFIX}"
                self._prepare(Segment(next(self._numbers), name, b"", 0, self._segment_bytes, Phase.FREE), create=True)
            elif not self._evict():
                self._refuse()
        return False

    @property
    def _may_grow(self) -> bool:
        return self.used + self._segment_bytes <= self.limit and self._clock.now() >= self._full_until

    def _prepare(self, old: Segment, *, create: bool) -> None:
        """Gives a file a new life: another id, so that nothing of an earlier one can be taken for this one's."""
        self._beginning = True
        self._sequence = max(self._sequence + 1, int(self._wall() * 1e6))
        head = Head(secrets.token_bytes(16), self._sequence, old.nbytes, int(self._wall()))
        segment = Segment(next(self._numbers), old.name, head.id, head.sequence, old.nbytes, Phase.OPEN)

        def job() -> None:
            available, _ = self.files.free()
            if available - (old.nbytes if create else 0) < self._reserve:
                if not create:
                    self.handles.forget(old.name)
                    self.files.unlink(old.name)
                raise NoRoom
            if create:
                self.files.create(old.name, old.nbytes).close()
            try:
                with self._staging.lend(PAGE) as buffer, self.handles.use(old.name) as file:
                    buffer[:PAGE] = np.frombuffer(head.pack(), np.uint8)
                    file.write(buffer[:PAGE], 0)
            except OSError:
                self.handles.forget(old.name)
                self.files.unlink(old.name)
                raise

        def ended(error: BaseException | None) -> None:
            self._beginning = False
            self._forget(old)
            if error is None:
                self._counts.device_bytes += PAGE
                self._enter(segment)
                self.open_segment = segment
            else:
                self._no_segment(old, error, create=create)
            self._place()

        self._executor.submit(job, ended)

    def _no_segment(self, old: Segment, error: BaseException, *, create: bool) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._trouble("no_space" if full else "write", error)
        self.used -= old.nbytes
        if create:
            self._full_until = self._clock.now() + FULL_S
        if not full:
            self._refuse()

    def _refuse(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for blocks, answers, done in waiting:
            for at, _ in blocks:
                answers[at] = Writing.FULL
            done(answers)

    def _make_room_ahead(self) -> None:
        late = self.open_segment is not None and self.open_segment.room < EVICT_AHEAD
        if late and not self._free and not self._may_grow:
            self._evict()

    def _evict(self) -> bool:
        """Begins to empty the oldest segment. False: there is none that can go, and none is on its way."""
        if self._eviction.busy:
            return True
        closed = [s for s in self.segments.values() if s.phase is Phase.CLOSED and not s.busy]
        if not closed:
            return any(s.busy and s.phase in (Phase.CLOSING, Phase.CLOSED) for s in self.segments.values())
        self._eviction.begin(min(closed, key=lambda segment: segment.sequence))
        return True

    def emptied(self, segment: Segment) -> None:
        """Its eviction has ended."""
        self._free_up(segment)
        self.wake()

    def _free_up(self, segment: Segment) -> None:
        """It holds nothing any more. A file of another size, or one too many, is not used again."""
        if segment.nbytes == self._segment_bytes and self.used <= self.limit and segment.phase is not Phase.DOOMED:
            segment.phase = Phase.FREE
            self._free.append(segment)
        else:
            self._unlink(segment)

    def _unlink(self, segment: Segment) -> None:
        segment.phase = Phase.FREE
        self.handles.forget(segment.name)

        def gone(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, FileNotFoundError):
                self._trouble("write", error)
            self.used -= segment.nbytes
            self._forget(segment)
            self.shrink()
            self.wake()

        self._executor.submit(partial(self.files.unlink, segment.name), gone)

    def clear(self) -> int:
        """Drops all blocks and unlinks all our files, as soon as nobody uses them; how many blocks."""
        dropped = 0
        self.open_segment = None
        self._free.clear()
        for segment in list(self.segments.values()):
            dropped += self._index.drop_segment(segment.number)
            if segment.phase is Phase.EVICTING:
                continue  # free in a moment
            segment.phase = Phase.DOOMED
            segment.busy += 1
            self.ended(segment)
        return dropped

    def shrink(self) -> None:
        """While there is more than may be, the oldest goes."""
        if self.used > self.limit:
            self._evict()

    # the rest ---------------------------------------------------------------------------------------------------------

    def _enter(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self._all[segment.number] = (self, segment)

    def _forget(self, segment: Segment) -> None:
        self.segments.pop(segment.number, None)
        self._all.pop(segment.number, None)

    def found(self, segment: Segment) -> None:
        """A file that an earlier life left."""
        self._sequence = max(self._sequence, segment.sequence)
        if segment.phase is Phase.FREE:
            self._free_up(segment)
        else:
            self._enter(segment)

    def settle(self) -> None:
        """Closes the open segment, so that the next life finds its footer."""
        self._close_open()

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(segment.busy for segment in self.segments.values())

    def _later(self, call: Callable[[], None]) -> None:
        self._executor.submit(lambda: None, lambda _: call())

    def close(self) -> None:
        self.handles.close()
        self.files.close()
