"""How long a request may be told to wait, said again, apart from the client that decides it (docs/design/adr/0015).

What others do is judged by what a person would say of a line: it moves, unless I am being served, or my turn is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.sim.oracle import Violation
from stepwell.client.questions import PrefixQuestion
from stepwell.protocol.messages import Found, GiveWay, LineMoved

NOTHING_MOVED_S = 0.05 + 0.25
"""Neither has this request got anything nor does the line move for it, though a read may take its time."""

NOTHING_SAID_S = 0.05 + 0.1
"""The well has not said a word about this request."""

NOTHING_SEEN_S = 0.15
"""The well has not said which tails are there."""

TURN_S = 2.0
"""Since this request came to be asked about, or since one in the line last had all that it asked for; and altogether,
for itself and for each of the most that were in the line with it at a time."""

EVER_S = 60.0
"""Altogether, whoever else is in the line."""

ROOM = ("pins", "no_room")
QUEUED = ("staging", *ROOM)


@dataclass(slots=True)
class _Place:
    """One request of an engine. `said`: the well has spoken of it. `queued`: it has been told to wait for what others
    wait for, too, and last for this `reason`. `over`: it need not wait any more; `offered`: because the engine has it.
    `streams`: it is recalled while its blocks are read. `waited`: until it was offered, and `turned` since the last
    turn; how long an engine takes to find pages is its own matter."""

    first: float = 0.0
    others: int = 0
    news: float = 0.0
    turn: float = 0.0
    said: bool = False
    queued: bool = False
    reason: str = ""
    over: bool = False
    offered: bool = False
    streams: bool = False
    waited: float = 0.0
    turned: float = 0.0

    @property
    def counts(self) -> bool:
        """For others, as one that is in the line: it is, or may well be."""
        return self.streams or (not self.over and (self.queued or (self.first > 0 and not self.said)))


@dataclass(slots=True)
class StreamWait:
    """Of one worker for the blocks of a stream, whose request had waited so long before it, since its last turn and
    altogether, beside so many others."""

    turned: float
    waited: float
    others: int
    turn: float = 0.0
    began: float = 0.0
    news: float = 0.0

    def still_in_time(self, now: float) -> None:
        """It is told to wait at this moment. Raises Violation if it should not be."""
        idle, waited = now - max(self.began, self.news), self.waited + now - self.began
        if idle >= NOTHING_MOVED_S:
            raise Violation("late", f"nothing of a stream has landed for {idle:.3f} s")
        turn = now - max(self.turn, self.began) if self.turn else self.turned + now - self.began
        if turn >= TURN_S or waited >= min((1 + self.others) * TURN_S, EVER_S):
            raise Violation("late", f"a stream is waited for after {waited:.3f} s, {self.others} beside it")


class Queue:
    """The requests of one engine that wait, by ticket."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def entered(self, ask: PrefixQuestion | None) -> None:
        if ask is not None:
            self._places[ask.ticket] = _Place()

    def told(self, found: Found, now: float) -> None:
        """The well has said something about it."""
        place = self._places.get(found.ticket)
        if place is None:
            return
        if found.slots:
            place.news = now
            if place.queued:
                self._room(now)
        place.queued = place.queued or found.reason in QUEUED
        place.reason = found.reason or place.reason
        place.said, place.over = True, place.over or not found.more

    def moved(self, message: LineMoved, now: float) -> None:
        """The well says that the line moves."""
        for ticket, place in self._places.items():
            if place.reason in QUEUED:
                place.others = max(place.others, message.sharing - 1)
                place.news = place.news if ticket in message.apart else now
                place.turn = now if message.whole else place.turn

    def gave_way(self, message: GiveWay) -> None:
        """It is to let go of its blocks, which is no news for it, and waits for room again."""
        place = self._places.get(message.ticket)
        if place is not None and not (place.offered or message.reason):
            place.queued, place.reason, place.over = True, "pins", False

    def _room(self, now: float) -> None:
        for other in self._places.values():
            other.news = now if other.reason in ROOM else other.news

    def offered(self, ask: PrefixQuestion, now: float, *, streams: bool) -> None:
        """Its wait has ended with something; that of the workers begins if it `streams`."""
        place = self._places[ask.ticket]
        place.over, place.offered, place.streams = True, True, streams
        place.waited = now - (place.first or now)
        place.turned = min(place.waited, now - place.turn)

    def streams(self, ask: PrefixQuestion) -> StreamWait:
        """It is recalled as a stream: how long a worker may wait for that."""
        place = self._places[ask.ticket]
        return StreamWait(place.turned, place.waited, place.others)

    def ended(self, ask: PrefixQuestion, now: float) -> None:
        """No worker waits for its stream any more."""
        place = self._places.pop(ask.ticket, None)
        if place is not None:
            self._room(now)

    def left(self, ask: PrefixQuestion, now: float) -> None:
        """It was recalled or given up, and what it had pinned is for others."""
        place = self._places.pop(ask.ticket, None)
        if place is not None and ask.blocks:
            self._room(now)

    def polled(self, ask: PrefixQuestion, now: float) -> None:
        """The engine comes to this request."""
        place = self._places[ask.ticket]
        if not place.first:
            place.first = now
            others = sum(other.counts for other in self._places.values() if other is not place)
            place.others = max(place.others, others)

    def still_in_time(self, ask: PrefixQuestion, now: float) -> None:
        """The request was told to wait at this moment. Raises Violation if it should not have been."""
        place = self._places[ask.ticket]
        waited = now - place.first
        late = ""
        if not ask.answered and waited >= NOTHING_SAID_S:
            late = f"unanswered after {waited:.3f} s"
        elif (idle := now - max(place.first, place.news)) >= NOTHING_MOVED_S:
            late = f"nothing moved for {idle:.3f} s ({ask.reason})"
        elif now - max(place.first, place.turn) >= TURN_S or waited >= min((1 + place.others) * TURN_S, EVER_S):
            late = f"waits for {waited:.3f} s ({ask.reason}), {place.others} beside it"
        if late:
            raise Violation("late", f"request {ask.ticket}: {late}")
