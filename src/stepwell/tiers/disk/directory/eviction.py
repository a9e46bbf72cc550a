"""Emptying the oldest segment of a directory: hot blocks are written again, then the segment is free.

    footer read ──► blocks that were used since they were written ──copied, one by one──► open segment ──► dropped

The oldest segment is evicted, and blocks in it that were used get another round (CLOCK over segments). At most a tenth
of a segment is written again, which bounds write amplification.
"""

from __future__ import annotations

from collections.abc import Callable

from stepwell.block.frame import is_unknown
from stepwell.block.layout import PAGE
from stepwell.tiers.base import Place, Reading
from stepwell.tiers.disk.directory.base import Directory
from stepwell.tiers.disk.layout import Footer, Records
from stepwell.tiers.disk.recovery import read_footer
from stepwell.tiers.disk.segment import Segment, SegmentPhase

REINSERTED = 0.1
"""Largest share of a segment that is written again when it is evicted."""


class Evictor:
    """Empties segments of one directory, one at a time, then passes each to `emptied`. `busy`: one is being emptied."""

    def __init__(self, directory: Directory, emptied: Callable[[Segment], None]) -> None:
        self.busy = False
        self._directory = directory
        self._emptied = emptied

    def begin(self, victim: Segment) -> None:
        """Empties a CLOSED segment that no job uses. It counts as in use until `emptied` is called."""
        shared = self._directory.shared
        self.busy = True
        victim.phase = SegmentPhase.EVICTING
        self._directory.use(victim)
        found: list[Footer | None] = []
        unknown: list[bool] = []

        def job() -> None:
            with self._directory.handles.use(victim.name) as file:
                found.append(read_footer(file, victim.id, shared.staging))
                with shared.staging.lend(PAGE) as first:
                    got = file.read(first[:PAGE], PAGE)
                    unknown.append(is_unknown(first[:got].tobytes(), victim.id))  # one release wrote all its frames

        def ended(error: BaseException | None) -> None:
            if error is not None:
                shared.trouble("read", error)
            footer = found[0] if found else None
            if any(unknown) or (footer is not None and not footer.understood):
                self._directory.keep_unknown(victim)
            self._reinsert(victim, self._hot(victim, footer) if footer is not None else [], 0)

        shared.executor.submit(job, ended)

    def _hot(self, victim: Segment, footer: Footer) -> list[tuple[Records, bytes]]:
        """Records of the blocks that were used since they were written, each with the commitment to its key."""
        records = footer.records
        used = self._directory.shared.index.hot(victim.number, [bytes(id) for id in records["block"]])
        budget = int(REINSERTED * victim.nbytes) // PAGE
        hot: list[tuple[Records, bytes]] = []
        for record, is_used in zip(records, used, strict=True):
            if is_used and budget >= record["pages"]:
                budget -= int(record["pages"])
                hot.append((record, footer.commitments[int(record["key"])]))
        return hot

    def _reinsert(self, victim: Segment, hot: list[tuple[Records, bytes]], first: int) -> None:
        """Copies hot blocks from `hot[first]` on, one after the other; then the victim is empty."""
        shared = self._directory.shared
        target = (
            self._directory.open_segment if victim.phase is SegmentPhase.EVICTING else None
        )  # else it was cleared meanwhile
        for at in range(first, len(hot)):
            record, commitment = hot[at]
            if self._directory.is_forgetting(bytes(record["namespace"])):
                continue
            again = shared.key_resolver.again(commitment, victim.id, target.id) if target is not None else None
            if target is not None and again is not None and target.fits(int(record["pages"]) * PAGE, again):
                self._copy(victim, target, hot, at, again)
                return
        if victim.phase is not SegmentPhase.KEPT:  # else it stays where it is, and its known blocks are readable
            shared.counts.evicted_blocks += shared.index.drop_segment(victim.number)
        self.busy = False
        self._emptied(victim)

    def _copy(
        self, victim: Segment, target: Segment, hot: list[tuple[Records, bytes]], at: int, commitment: bytes
    ) -> None:
        directory, shared = self._directory, self._directory.shared
        record, _ = hot[at]
        id, nbytes, source = bytes(record["block"]), int(record["pages"]) * PAGE, int(record["page"])
        page, ordinal = target.take(nbytes, nbytes // PAGE, commitment)  # it has no more parts than that
        answers: list[Reading] = []
        directory.use(target)

        def job() -> None:
            with shared.staging.lend(nbytes) as old, shared.staging.lend(nbytes) as new:
                try:
                    with directory.handles.use(victim.name) as file:
                        got = file.read(old[:nbytes], source * PAGE)
                except OSError as error:
                    shared.trouble("read", error)
                    return
                place = Place(target.id, ordinal)
                if got == nbytes:
                    answers.append(shared.key_resolver.remake(old[:nbytes], victim.id, new[:nbytes], place))
                if Reading.GOOD in answers:
                    with directory.handles.use(target.name) as file:
                        file.write(new[:nbytes], page * PAGE)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                directory.failed(target, error)
            elif Reading.UNKNOWN in answers:
                directory.keep_unknown(victim)
            elif Reading.GOOD in answers:
                shared.counts.device_bytes += nbytes
                target.codecs |= victim.codecs
                target.record(id, bytes(record["namespace"]), page, nbytes, commitment, int(record["expires"]))
                if shared.index.find(id) == (victim.number, source):
                    shared.counts.reinserted_blocks += 1
                    shared.index.put(id, target.number, page)
            directory.ended(target)
            self._reinsert(victim, hot, at + 1)

        shared.executor.submit(job, ended)
