"""Which requests wait for what, and which go on when something has happened."""

from __future__ import annotations

from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import News
from stepwell.hierarchy.sessions.session import Session, Ticket


class Waiting:
    """A ticket may wait for anything that may change, for one block to land, or for both."""

    def __init__(self) -> None:
        self._anything: dict[Ticket, Session] = {}
        self._landing: dict[Entry, dict[Ticket, Session]] = {}
        self._starved = False  # a ticket waits for slots that are held at the moment

    @property
    def any(self) -> bool:
        """Some ticket waits."""
        return bool(self._anything or self._landing)

    def for_anything(self, ticket: Ticket, session: Session, *, starved: bool) -> None:
        """The ticket waits for anything that may change; `starved`: for slots that are held at the moment, too."""
        self._anything[ticket] = session
        self._starved = self._starved or starved

    def for_block(self, entry: Entry, ticket: Ticket, session: Session) -> None:
        """The ticket waits for this block of its run to land."""
        self._landing.setdefault(entry, {})[ticket] = session

    def landing(self, entry: Entry) -> int:
        """Tickets that wait for this block."""
        return len(self._landing.get(entry, ()))

    def woken(self, ticket: Ticket) -> None:
        """Something else has made the ticket look: it waits for nothing that may change."""
        self._anything.pop(ticket, None)

    def no_block(self, ticket: Ticket) -> None:
        """The ticket waits no more for the block that is the next of its run."""
        if ticket.landed < len(ticket.pinned):
            awaited = ticket.pinned[ticket.landed]
            others = self._landing.get(awaited, {})
            others.pop(ticket, None)
            if not others:
                self._landing.pop(awaited, None)

    def no_blocks(self) -> None:
        """Tickets that wait for blocks are to look again, and find that these do not come."""
        for tickets in self._landing.values():
            self._anything |= tickets
        self._landing.clear()

    def take(self, news: News) -> dict[Ticket, Session]:
        """The tickets that go on because of this. They wait for nothing any more."""
        if news.tier_down:
            self.no_blocks()
        again: dict[Ticket, Session] = {}
        for entry in news.landed:
            again |= self._landing.pop(entry, {})
        freed = news.freed or bool(news.landed)
        if news.changed or news.tier_down or (freed and self._starved):
            self._starved = False
            again |= self._anything
            self._anything = {}
        return again
