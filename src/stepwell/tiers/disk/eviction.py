"""Emptying the oldest segment of a directory: hot blocks are written again, then the segment is free.

    footer read ──► blocks that were used since they were written ──copied, one by one──► open segment ──► dropped

The oldest segment goes, and what was used in it gets another round (CLOCK, in segments). At most a tenth of a segment
is written again, so that writes are amplified by little more than that.
"""

from __future__ import annotations

from typing import Protocol

from stepwell.block.layout import PAGE
from stepwell.io.executor import Executor
from stepwell.io.staging import Staging
from stepwell.tiers.base import Locksmith, Place, TierCounts
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.layout import Footer, Records
from stepwell.tiers.disk.recovery import read_footer
from stepwell.tiers.disk.segment import Handles, Phase, Segment

REINSERTED = 0.1
"""Most of a segment that is written again when it is evicted."""


class Owner(Protocol):
    """What an eviction needs of the directory whose segment it empties."""

    handles: Handles

    @property
    def open_segment(self) -> Segment | None: ...

    def use(self, segment: Segment) -> None: ...

    def ended(self, segment: Segment) -> None: ...

    def failed(self, segment: Segment, error: BaseException) -> None: ...

    def trouble(self, kind: str, error: BaseException, /) -> None: ...

    def emptied(self, segment: Segment) -> None: ...

    def forgets(self, namespace: bytes, /) -> bool: ...


class Eviction:
    """Empties segments of one directory, one after the other. `busy`: one is being emptied."""

    def __init__(
        self,
        owner: Owner,
        index: BlockIndex,
        staging: Staging,
        executor: Executor,
        locksmith: Locksmith,
        counts: TierCounts,
    ) -> None:
        self.busy = False
        self._owner = owner
        self._index = index
        self._staging = staging
        self._executor = executor
        self._locksmith = locksmith
        self._counts = counts

    def begin(self, victim: Segment) -> None:
        """Empties this CLOSED segment that nobody uses; `owner.emptied` is told. It is in use until then."""
        self.busy = True
        victim.phase = Phase.EVICTING
        self._owner.use(victim)
        found: list[Footer | None] = []

        def job() -> None:
            with self._owner.handles.use(victim.name) as file:
                found.append(read_footer(file, victim.id, self._staging))

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self._owner.trouble("read", error)
            footer = found[0] if found else None
            self._reinsert(victim, self._hot(victim, footer) if footer is not None else [], 0)

        self._executor.submit(job, ended)

    def _hot(self, victim: Segment, footer: Footer) -> list[tuple[Records, bytes]]:
        """Records of the blocks that were used since they were written, and the commitments to their keys."""
        records = footer.records
        used = self._index.hot(victim.number, [bytes(id) for id in records["block"]])
        budget = int(REINSERTED * victim.nbytes) // PAGE
        hot: list[tuple[Records, bytes]] = []
        for record, is_used in zip(records, used, strict=True):
            if is_used and budget >= record["pages"]:
                budget -= int(record["pages"])
                hot.append((record, footer.commitments[int(record["key"])]))
        return hot

    def _reinsert(self, victim: Segment, hot: list[tuple[Records, bytes]], first: int) -> None:
        """Copies hot blocks from this one on, each when the one before it is done; then the victim is empty."""
        target = self._owner.open_segment if victim.phase is Phase.EVICTING else None  # else it was cleared meanwhile
        for at in range(first, len(hot)):
            record, commitment = hot[at]
            if self._owner.forgets(bytes(record["namespace"])):
                continue
            again = self._locksmith.again(commitment, victim.id, target.id) if target is not None else None
            if target is not None and again is not None and target.fits(int(record["pages"]) * PAGE, again):
                self._copy(victim, target, hot, at, again)
                return
        self._counts.evicted_blocks += self._index.drop_segment(victim.number)
        self.busy = False
        self._owner.emptied(victim)

    def _copy(
        self, victim: Segment, target: Segment, hot: list[tuple[Records, bytes]], at: int, commitment: bytes
    ) -> None:
        record, _ = hot[at]
        id, nbytes, source = bytes(record["block"]), int(record["pages"]) * PAGE, int(record["page"])
        page, ordinal = target.take(nbytes, nbytes // PAGE, commitment)  # it has no more parts than that
        copied: list[bool] = []
        self._owner.use(target)

        def job() -> None:
            with self._staging.lend(nbytes) as old, self._staging.lend(nbytes) as new:
                try:
                    with self._owner.handles.use(victim.name) as file:
                        got = file.read(old[:nbytes], source * PAGE)
                except OSError as error:
                    self._owner.trouble("read", error)
                    return
                place = Place(target.id, ordinal)
                if got == nbytes and self._locksmith.remake(old[:nbytes], victim.id, new[:nbytes], place):
                    with self._owner.handles.use(target.name) as file:
                        file.write(new[:nbytes], page * PAGE)
                    copied.append(True)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self._owner.failed(target, error)
            elif copied:
                self._counts.device_bytes += nbytes
                target.record(id, bytes(record["namespace"]), page, nbytes, commitment, int(record["expires"]))
                if self._index.find(id) == (victim.number, source):
                    self._counts.reinserted_blocks += 1
                    self._index.put(id, target.number, page)
            self._owner.ended(target)
            self._reinsert(victim, hot, at + 1)

        self._executor.submit(job, ended)
