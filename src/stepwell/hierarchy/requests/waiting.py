"""The requests that wait, by what they wait for."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import News
from stepwell.hierarchy.sessions.session import RecallRequest, Session


class Waiting:
    """A request may wait for anything that may change, for one block to land, or for both."""

    def __init__(self) -> None:
        self._anything: dict[RecallRequest, Session] = {}
        self._landing: dict[Entry, dict[RecallRequest, Session]] = {}
        self._starved = False  # a request waits for slots that are held at the moment

    @property
    def any(self) -> bool:
        """True if a request waits."""
        return bool(self._anything or self._landing)

    def all(self) -> Iterator[tuple[RecallRequest, Session]]:
        """The requests that wait, each once."""
        yield from self._anything.items()
        yield from ((request, of) for request, of in self.for_blocks() if request not in self._anything)

    def for_blocks(self) -> Iterator[tuple[RecallRequest, Session]]:
        """The requests that wait for a block to land."""
        for requests in self._landing.values():
            yield from requests.items()

    def awaits(self, entry: Entry) -> bool:
        """A request waits for this block."""
        return entry in self._landing

    def for_anything(self, request: RecallRequest, session: Session, *, starved: bool) -> None:
        """The request waits for anything that may change; `starved`: for slots that are held at the moment, too."""
        self._anything[request] = session
        self._starved = self._starved or starved

    def for_block(self, entry: Entry, request: RecallRequest, session: Session) -> None:
        """The request waits for this block of its run to land."""
        self._landing.setdefault(entry, {})[request] = session

    def woken(self, request: RecallRequest) -> None:
        """Ends the wait for anything: something else has made the request look."""
        self._anything.pop(request, None)

    def no_block(self, request: RecallRequest) -> None:
        """Ends the wait for the next block of the request's run."""
        if request.landed < len(request.pinned):
            awaited = request.pinned[request.landed]
            others = self._landing.get(awaited, {})
            others.pop(request, None)
            if not others:
                self._landing.pop(awaited, None)

    def no_blocks(self) -> None:
        """Has requests that wait for blocks look again, to find that these do not come."""
        for requests in self._landing.values():
            self._anything |= requests
        self._landing.clear()

    def take(self, news: News) -> dict[RecallRequest, Session]:
        """Takes the requests that go on because of this; they wait for nothing any more."""
        if news.tier_down:
            self.no_blocks()
        again: dict[RecallRequest, Session] = {}
        for entry in news.landed:
            again |= self._landing.pop(entry, {})
        freed = news.freed or bool(news.landed)
        if news.changed or news.tier_down or (freed and self._starved):
            self._starved = False
            again |= self._anything
            self._anything = {}
        return again
