"""Recalls that are being copied: their blocks are leased until each rank has said that its copy has ended."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import News
from stepwell.hierarchy.sessions.session import Session, Transfer

MAX_EARLY = 4096
"""Transfers of a session that are acknowledged and not known: as many as may be under way."""


class Transfers:
    def __init__(self, arena: Arena, news: News) -> None:
        self._arena = arena
        self._news = news

    def begin(self, session: Session, number: int, entries: Sequence[Entry]) -> None:
        """Leases these blocks. A worker's socket is another one than the scheduler's, so that its acknowledgement may
        have come first."""
        missing = {m.hello.rank for m in session.workers.values()} - self.early(session, number)
        if missing:
            for entry in entries:
                self._arena.lease(entry)
            session.transfers[number] = Transfer(list(entries), missing)

    def early(self, session: Session, number: int) -> set[int]:
        """The ranks that have acknowledged this transfer before it was known, which is forgotten with it."""
        return session.early.pop(number, set())

    def ended(self, session: Session, rank: int, numbers: list[int]) -> None:
        """This rank's copies have ended."""
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
                for entry in transfer.entries:
                    self._arena.release(entry)
                self._news.freed = True
