"""One directory of the disk tier: its segments, which one is written, and how room is made.

Everything but the jobs happens on the owner's thread. A segment's life:

    file created, or free ──head written──► OPEN ──full, or a write failed──► CLOSING ──footer──► CLOSED
      ▲                                                                                            │
      └── FREE ◄──nobody reads it any more── EMPTY ◄──hot blocks copied── EVICTING ◄──the oldest───┘

and from each of them to DOOMED, which ends with the file's deletion. A CLOSED one stays so while it is swept of a
namespace. What can be found in a segment that is closed is in its footer, or it has none (see `Sweep`). `busy` counts
the jobs that use a segment's file: while there are any it is neither deleted nor given another life.

Bounds: files of ours never exceed `limit` bytes; no file is made, and none is used again, where that leaves others less
than `reserve` bytes of free space; then a file that became free is deleted instead.
"""

from __future__ import annotations

import errno
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from stepwell.block.layout import PAGE
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.files import Files
from stepwell.io.staging import Staging
from stepwell.tiers.base import Forgotten, Locksmith, Outgoing, Reading, TierCounts, WriteDone
from stepwell.tiers.disk.calls import Run
from stepwell.tiers.disk.deletion import Deletion
from stepwell.tiers.disk.eviction import Eviction
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.layout import Footer, Head
from stepwell.tiers.disk.placing import Placing
from stepwell.tiers.disk.segment import Handles, Phase, Segment
from stepwell.tiers.disk.space import NoRoom, Space
from stepwell.tiers.disk.stream import blank, read_run, write_bytes
from stepwell.tiers.disk.sweep import Sweep

EVICT_AHEAD = 0.25
"""Share of the open segment that is still free when room is made for the next: hot blocks go in there."""

MOST_OPEN = 512
SUFFIX = ".seg"


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
        entropy: Callable[[int], bytes],
    ) -> None:
        self.space = Space(limit, reserve, clock)
        self.files = files
        self.handles = Handles(files, MOST_OPEN)
        self.segment_bytes = segment_bytes
        self._index = index
        self._all = segments
        self._numbers = numbers
        self._staging = staging
        self._executor = executor
        self._wall = wall
        self._counts = counts
        self.trouble = trouble
        self._changed = changed
        self._entropy = entropy
        self.segments: dict[int, Segment] = {}
        self.open_segment: Segment | None = None
        self._eviction = Eviction(self, index, staging, executor, locksmith, counts)
        self._deletion = Deletion(self, index, executor)
        self._sweep = Sweep(self, index, self._deletion, staging, executor, counts)
        self._free: deque[Segment] = deque()
        self._closed: list[tuple[int, int]] = []  # heap of sequence and number: the oldest goes first
        self._beginning = False  # a segment is being made ready
        self._sequence = 0
        self._placing = Placing(self, index, staging, executor, counts)
        self._jobs = 0  # that use segments
        self.reads: set[Run] = set()  # that are under way
        self._to_clear: list[Callable[[], None]] = []
        self.ready = False  # what lies here is known
        self.unreadable = False  # it could not be found out
        self.unseen = False  # that, or whether some of its files are ours and what is in them

    @property
    def used(self) -> int:
        return self.space.used

    @property
    def limit(self) -> int:
        return self.space.limit

    # reading ----------------------------------------------------------------------------------------------------------

    def read(self, run: Run) -> Callable[[list[Reading]], None]:
        """A job that reads the run and writes its answers into the list that it is given. Then call `read_ended`."""
        segment = run.segment
        self.use(segment)
        self.reads.add(run)

        def job(answers: list[Reading]) -> None:
            try:
                with self.handles.use(segment.name) as file:
                    read_run(file, run, answers, self._staging, lambda error: self.trouble("read", error))
            except FileNotFoundError:
                pass  # they are absent
            except OSError as error:
                self.trouble("read", error)
                for at, _ in run.blocks:
                    answers[at] = Reading.FAILED

        return job

    def read_ended(self, run: Run) -> None:
        self.reads.discard(run)
        self.ended(run.segment)

    def use(self, segment: Segment) -> None:
        """A job is about to use the segment's file: call `ended` when it has ended."""
        segment.busy += 1
        self._jobs += 1

    def ended(self, segment: Segment) -> None:
        """A job that used the segment has ended."""
        segment.busy -= 1
        self._jobs -= 1
        if segment.busy:
            return
        if segment.phase is Phase.CLOSING:
            self._finish(segment)
        elif segment.phase is Phase.EMPTY:
            self._free_up(segment)
        elif segment.phase is Phase.DOOMED:
            self._deletion.go(segment)

    def wake(self) -> None:
        """Something has ended that those who wait for room, or for quiet, may have waited for."""
        self.shrink()
        self._placing.go_on()
        self._sweep.go_on()
        self._changed()

    # writing ----------------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        most = self.segment_bytes - PAGE - Footer.nbytes(1)
        self._placing.add(blocks, most, done)

    def placed(self) -> None:
        """Blocks have got places in the open segment: room for the next may have to be made."""
        late = self.open_segment is not None and self.open_segment.room < EVICT_AHEAD
        if late and not self._free and not self.space.may_take(self.segment_bytes):
            self._evict()

    def goes(self, segment: Segment, namespace: bytes) -> bool:
        """What this segment has of the namespace is on its way out."""
        return segment.phase is Phase.DOOMED or self._sweep.concerns(segment, namespace)

    def failed(self, segment: Segment, error: BaseException) -> None:
        """A write to it failed: what is on the device now nobody knows, so nothing more is placed in it. What was
        written before stays readable: each frame proves itself."""
        self.trouble(self.space.trouble(error), error)
        segment.torn = True
        if segment is self.open_segment:
            self.open_segment = None
        if segment.phase is Phase.OPEN:
            segment.phase = Phase.CLOSING

    def _close_open(self) -> None:
        segment, self.open_segment = self.open_segment, None
        if segment is not None:
            segment.phase = Phase.CLOSING
            self.use(segment)  # so that what follows happens once, here or when its last job ends
            self.ended(segment)

    def _finish(self, segment: Segment) -> None:
        """All its jobs have ended: the footer is written. Not where a write failed: parts of it may lie there, and the
        footer would hide them. Whoever looks for what there is looks at the frames."""
        if not segment.records:
            self._free_up(segment)
            return
        footer = segment.footer()
        segment.records, segment.commitments = [], {}
        if segment.torn:
            self._close(segment)
        else:
            self._write_footer(segment, footer)

    def _close(self, segment: Segment) -> None:
        segment.phase = Phase.CLOSED
        heapq.heappush(self._closed, (segment.sequence, segment.number))

    def close_found(self, segment: Segment, footer: Footer) -> None:
        """Writes the footer of a segment that an earlier life left open, so that the next one finds it. It would hide
        blocks of which parts were written, or a header misread just now: so what it does not list becomes zeros."""
        if len(footer.records) and Footer.nbytes(len(footer.records)) <= self._unused_end(segment, footer):
            segment.phase = Phase.CLOSING
            self._write_footer(segment, footer, found=True)

    @staticmethod
    def _unused_end(segment: Segment, footer: Footer) -> int:
        last = footer.records[-1]
        return segment.nbytes - (int(last["page"]) + int(last["pages"])) * PAGE

    def _write_footer(self, segment: Segment, footer: Footer, *, found: bool = False) -> None:
        """`found`: there may be more in it than the footer lists, and that goes before."""
        raw = footer.pack()
        written = [len(raw)]
        self.use(segment)

        def job() -> None:
            with self.handles.use(segment.name) as file:
                if found:
                    written.append(blank(file, footer.records, (segment.nbytes - len(raw)) // PAGE))
                write_bytes(file, raw, segment.nbytes - len(raw), self._staging)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self.trouble(self.space.trouble(error), error)
            else:
                self._counts.device_bytes += sum(written)
            if segment.phase is Phase.CLOSING:
                self._close(segment)
            self.ended(segment)
            self.wake()

        self._executor.submit(job, ended)

    # making room ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Sees to it that there will be an open segment with room, or tells those who wait that there will be none."""
        if self._beginning:
            return
        self._close_open()
        if self.unreadable or self.space.ill:
            self._placing.refuse()
        elif not self.ready:
            return
        elif self._free:
            self._prepare(self._free.popleft(), create=False)
        elif self.space.may_take(self.segment_bytes):
            self.space.used += self.segment_bytes
            name = f"{self._entropy(8).hex()}{SUFFIX}"
            new = Segment(next(self._numbers), name, b"", 0, self.segment_bytes, Phase.BEGINNING)
            self._enter(new)
            self._prepare(new, create=True)
        elif not self._evict():
            self._deletion.again()  # what could not be deleted still counts, and may go by now
            self._placing.refuse()

    def _prepare(self, old: Segment, *, create: bool) -> None:
        """Gives a file a new life: another id, so that nothing of an earlier one can be taken for this one's."""
        self._beginning = True
        old.phase = Phase.BEGINNING
        self._sequence = max(self._sequence + 1, int(self._wall() * 1e6))
        head = Head(self._entropy(16), self._sequence, old.nbytes, int(self._wall()))

        def job() -> None:
            available, _ = self.files.free()
            if available - (old.nbytes if create else 0) < self.space.reserve:
                raise NoRoom
            if create:
                self.files.create(old.name, old.nbytes).close()
            self.handles.forget(old.name)  # so that a file that somebody has deleted is found missing
            with self.handles.use(old.name) as file:
                write_bytes(file, head.pack(), 0, self._staging)

        def ended(error: BaseException | None) -> None:
            self._beginning = False
            if error is None:
                self._counts.device_bytes += PAGE
                self.forget(old)
                segment = Segment(next(self._numbers), old.name, head.id, head.sequence, old.nbytes, Phase.OPEN)
                self._enter(segment)
                self.open_segment = segment
            else:
                if create or not isinstance(error, FileNotFoundError):  # somebody deleted it: not the device's doing
                    self.trouble(self.space.trouble(error, growing=create), error)
                if isinstance(error, OSError) and error.errno == errno.EROFS and not create:
                    self._free_up(old)  # nor can it be deleted: it waits for the next try, which so costs no other one
                else:
                    self._deletion.doom(old)
            self.wake()

        self._executor.submit(job, ended)

    def _evict(self) -> bool:
        """Begins to empty the oldest segment that nobody uses. False: there is none that can go, and none is on its
        way."""
        if self._eviction.busy:
            return True
        victim = None
        in_use: list[tuple[int, int]] = []
        while victim is None and self._closed:
            entry = heapq.heappop(self._closed)
            segment = self.segments.get(entry[1])
            if segment is None or segment.phase is not Phase.CLOSED:
                continue
            if segment.busy:
                in_use.append(entry)
            else:
                victim = segment
        for entry in in_use:
            heapq.heappush(self._closed, entry)
        if victim is not None:
            self._eviction.begin(victim)
            return True
        leaving = (Phase.CLOSING, Phase.CLOSED, Phase.EMPTY, Phase.DOOMED)
        return any(segment.phase in leaving for segment in self.segments.values())

    def emptied(self, segment: Segment) -> None:
        """Its eviction has ended."""
        if segment.phase is Phase.EVICTING:
            segment.phase = Phase.EMPTY
        self.ended(segment)
        self.wake()

    def _free_up(self, segment: Segment) -> None:
        """It holds nothing any more. A file of another size, or one too many, is not used again."""
        if segment.nbytes == self.segment_bytes and not self.space.over:
            segment.phase = Phase.FREE
            self._free.append(segment)
        else:
            self._deletion.doom(segment)

    def shrink(self) -> None:
        """While there is more than may be, the oldest goes."""
        while self.space.over:
            if not self._free:
                self._evict()
                return
            self._deletion.doom(self._free.popleft())

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        """Forgets all blocks, or those of one namespace: see `Sweep`. Of them, what waits for a place gets none. While
        it is not known what lies here, all this waits."""
        if not (self.ready or self.unreadable):
            self._to_clear.append(partial(self.clear, done, namespace))
            return
        self._placing.refuse(namespace)
        self._deletion.again()
        if namespace and self.open_segment is not None and self.open_segment.blocks:
            self._close_open()
        self._sweep.begin(namespace, done)

    def forgets(self, namespace: bytes) -> bool:
        return self._sweep.forgets(namespace)

    def discard(self, segment: Segment) -> None:
        """Its file goes with all that it holds, as soon as nobody uses it."""
        if segment is self.open_segment:
            self.open_segment = None
        elif segment.phase is Phase.FREE:
            self._free.remove(segment)
        self._deletion.doom(segment)

    # the rest ---------------------------------------------------------------------------------------------------------

    def _enter(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self._all[segment.number] = (self, segment)

    def forget(self, segment: Segment) -> None:
        """There is no such segment any more."""
        self.segments.pop(segment.number, None)
        self._all.pop(segment.number, None)

    def found(self, segment: Segment) -> None:
        """A file that an earlier life left: CLOSED, KEPT or EMPTY."""
        self._sequence = max(self._sequence, segment.sequence)
        self._enter(segment)
        if segment.phase is Phase.EMPTY:
            self._free_up(segment)
        elif segment.phase is Phase.CLOSED:
            self._close(segment)

    def known(self, *, unreadable: bool) -> None:
        """All that an earlier life left was found, or cannot be. Nothing is written before: only now it is known how
        much is used."""
        self.ready, self.unreadable = not unreadable, unreadable
        self.unseen |= unreadable
        waiting, self._to_clear = self._to_clear, []
        for clear in waiting:
            clear()
        self.wake()

    def settle(self) -> None:
        """Closes the open segment, so that the next life finds its footer."""
        self._close_open()

    @property
    def busy(self) -> bool:
        return self._placing.waits or self._beginning or self._jobs > 0 or self._sweep.busy

    def close(self) -> None:
        self.handles.close()
        self.files.close()
