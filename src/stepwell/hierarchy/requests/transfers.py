"""Recalls that are being copied: their blocks are leased until each rank has said that its copy has ended.

Those of a stream are leased as they land, announced to the workers, and let go as soon as all ranks have copied them.
So a run of any length goes through whatever room there is, and is copied while it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.requests.pins import Pins
from stepwell.hierarchy.sessions.session import RecallRequest, RecallStream, Session, Transfer
from stepwell.protocol.messages import Landed

MAX_EARLY = 4096
"""Transfers of a session that are acknowledged and not known: as many as may be under way."""


class Transfers:
    def __init__(self, core: Core, arena: Arena, pins: Pins) -> None:
        self._arena = arena
        self._pins = pins
        self._news = core.news
        self._clock = core.clock

    def begin(
        self, session: Session, number: int, entries: Sequence[Entry], stream: RecallStream | None = None
    ) -> bool:
        """Leases these blocks. A worker's socket is another one than the scheduler's, so that its acknowledgement may
        have come first. False: all of them have."""
        missing = {m.hello.rank for m in session.workers.values()} - self.early(session, number)
        if missing:
            self._arena.lease(*entries)
            session.transfers[number] = Transfer(deque(entries), missing, stream)
        return bool(missing)

    def stream(self, session: Session, request: RecallRequest, number: int, first: int, count: int) -> bool:
        """Makes a stream of the request, for so many blocks from `first` on. False: all ranks have given it up."""
        ranks = {member.hello.rank: 0 for member in session.workers.values()}
        if not self.begin(session, number, (), RecallStream(request, first, ranks, self._clock.now())):
            return False
        request.transfer, request.told = number, min(first, request.landed)
        self._pins.free(request, request.told)
        if first + count < request.most:
            request.most = first + count
            request.short = request.ends_known if request.most == request.known else "end"
        return True

    def land(
        self, session: Session, request: RecallRequest, end: int, *, more: bool, reason: str, allow_s: float
    ) -> None:
        """Leases blocks of the run up to `end`, which have landed since the last time, and announces them."""
        transfer = session.transfers[request.transfer]
        assert transfer.stream is not None
        transfer.stream.told_all = not more
        self._pins.free(request, min(transfer.stream.first, end))
        news = request.pinned[max(request.told, transfer.stream.first) : end]
        request.told = end
        self._arena.lease(*news)
        transfer.entries += news
        self.announce(session, Landed(request.transfer, b"".join(e.refs for e in news), more, reason, allow_s))

    def announce(self, session: Session, landed: Landed) -> None:
        """Tells all workers."""
        for member in session.workers.values():
            member.channel.send(landed)

    def copied(self, session: Session, rank: int, number: int, blocks: int) -> bool:
        """This rank has copied the first `blocks` of a stream. True: that made room."""
        transfer = session.transfers.get(number)
        if transfer is None or transfer.stream is None:
            return False  # it has ended, or never was one
        stream, before = transfer.stream, transfer.stream.done
        told = stream.request.told - stream.first
        stream.copied[rank] = max(stream.copied[rank], min(blocks, told))
        for _ in range(stream.done - before):
            entry = transfer.entries.popleft()
            stream.copied_bytes += entry.nbytes
            self._arena.release(entry)
            self._news.freed = True
        if stream.done == before:
            return False
        self._pins.free(stream.request, stream.first + stream.done)
        return True

    def early(self, session: Session, number: int) -> set[int]:
        """The ranks that have acknowledged this transfer before it was known, which is forgotten with it."""
        return session.early.pop(number, set())

    def ended(self, session: Session, rank: int, numbers: list[int]) -> Iterator[Transfer]:
        """This rank's copies have ended. Yields those that are streams, which are over where no rank is missing."""
        for number in numbers:
            transfer = session.transfers.get(number)
            if transfer is None:
                session.early.setdefault(number, set()).add(rank)
                if len(session.early) > MAX_EARLY:
                    del session.early[next(iter(session.early))]
                continue
            transfer.missing.discard(rank)
            if not transfer.missing:
                del session.transfers[number]
                self._arena.release(*transfer.entries)
                self._news.freed = True
            if transfer.stream is not None:
                yield transfer
