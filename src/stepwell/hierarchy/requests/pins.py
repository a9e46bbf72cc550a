"""Pins of waiting requests: soft holds on the blocks of their runs, of which there may be a share of host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from stepwell.block.state import BlockState
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.sessions.session import RecallRequest, Session
from stepwell.hierarchy.work import Work
from stepwell.protocol.messages import GiveWay

AT_LEAST = 2
"""Blocks of a stream that find room: one is read while another one is copied."""

AT_ONCE = 32
"""Pins let go without giving others a turn."""


class Pins:
    """`share`: of host memory, that waiting requests may pin together. `leaving`: requests that have ended and whose
    pins are being let go."""

    def __init__(self, core: Core, arena: Arena, stack: Stack, share: float) -> None:
        self._arena = arena
        self._stack = stack
        self._news = core.news
        self._work = core.work
        self._host_bytes = core.limits.host_bytes
        self._share = share
        self.leaving: set[RecallRequest] = set()

    def follow(self, share: float) -> None:
        """Sets the share of host memory that waiting requests may pin together."""
        self._share = share
        self._news.changed = True  # there may be room

    def room(self, session: Session, request: RecallRequest, nbytes: int) -> bool:
        """There is room for so many more bytes; one block finds some however small the share is. So do a few of the
        session's oldest stream, which its workers copy first: else they might wait for it, and it for what others hold
        that they come to later."""
        if not self._arena.pins or self.fit(session, nbytes):
            return True
        return self._goes_on(session, request)

    def _goes_on(self, session: Session, request: RecallRequest) -> bool:
        """It is the session's oldest stream and has little under way."""
        if not request.transfer or len(request.pinned) - request.freed >= AT_LEAST:
            return False
        return next(_streams(session), None) is request

    def fit(self, session: Session, nbytes: int) -> bool:
        """So many more bytes may be pinned, whichever request wants them: they are within the share, and of the slots
        for blocks of this model enough are left for a few."""
        assert session.owner is not None
        holding = self._arena.holdings[session.owner]
        left = holding.slots - (holding.pinned_bytes + nbytes) // session.owner.slot_bytes
        return self.in_share(nbytes) and left >= AT_LEAST * session.shards

    def in_share(self, nbytes: int) -> bool:
        """So many more bytes are within the share."""
        return self._arena.pinned_bytes + nbytes <= self._share * self._host_bytes

    def make_room(self, session: Session, request: RecallRequest) -> bool:
        """For the session's oldest stream, where nothing is left that may go: a block goes that is kept for those
        behind it alone, the last of its run. False: there is none."""
        for stream in _streams(session) if self._goes_on(session, request) else ():
            entry = stream.pinned[stream.freed - 1] if stream.freed else None
            while entry is not None:
                if entry.state is BlockState.RESIDENT and not (entry.pins or entry.leases):
                    self._arena.drop(entry, "evicted")
                    return True
                entry = entry.parent
        return False

    def passes(self, request: RecallRequest, level: Level, nbytes: int) -> bool:
        """The next block of the request's run, which may not be pinned all together, is not of its head: as much as may
        be pinned beside what the tier is asked for at a time. It is copied and makes room for the next."""
        most, at = self._share * self._host_bytes, len(request.pinned)
        known = min(request.known, request.most)
        return known * nbytes > most and (at + 1) * nbytes > most - level.reads.in_flight

    def fills_window(self, request: RecallRequest, level: Level, nbytes: int) -> bool:
        """As much of the run is under way as keeps the tier busy, of small host memory half of what may be pinned, and
        a few blocks at least: for more of what passes, nothing is to be displaced that the policy ranks."""
        ended = request.freed if request.transfer else request.landed
        window = min(level.reads.in_flight, int(self._share * self._host_bytes) // 2)
        return (len(request.pinned) - ended + 1) * nbytes > max(AT_LEAST * nbytes, window)

    def others(self, request: RecallRequest) -> bool:
        """True if other requests have pins, which will end."""
        return self._arena.pins > len(request.pinned) - request.freed

    def ask_way(self, session: Session, request: RecallRequest) -> None:
        """Asks the last request of the session's queue that holds pins of its own to give way to this earlier one,
        whose turn is before its turn. Pins that others share make no room when they end: then the two would ask and
        give way for ever."""
        later = [
            t
            for t in session.requests.values()
            if t.order > request.order and t.pinned and not (t.asked_way or t.transfer)
            if t.turn.place > request.turn.place and any(entry.pins == 1 for entry in reversed(t.pinned))
        ]
        if later and session.scheduler is not None:
            last = max(later, key=lambda t: t.order)
            last.asked_way = True
            session.scheduler.channel.send(GiveWay(last.number))

    def comes_behind(self, session: Session, request: RecallRequest) -> bool:
        """The request has given way, and an earlier one of its session still waits for room. Until that one has it, the
        request pins nothing, blocks that others hold for it included: two that share a block would hold it in turn, one
        while the other gives way."""
        return request.gave_way and any(
            t.waiting == "pins" and t.order < request.order and t.turn.place < request.turn.place
            for t in session.requests.values()
        )

    def may_take(self, session: Session, request: RecallRequest, of: Session, other: RecallRequest) -> bool:
        """The other request, whose turn is after this one's, has a pin for a block that nobody else wants and that is
        not being read yet. A stream keeps a few."""
        if other.turn.place <= request.turn.place or of.owner is not session.owner:
            return False
        if len(other.pinned) - other.freed <= (AT_LEAST if other.transfer else 0):
            return False
        last = other.pinned[-1]
        return last.pins == 1 and last.source >= 0 and self._stack.levels[last.source].reads.waits(last)

    def add(self, request: RecallRequest, entry: Entry) -> None:
        """Pins the next block of the request's run."""
        self._arena.pin(entry)
        request.pinned.append(entry)
        request.promoted.append(entry.state is BlockState.FILLING)

    def add_run(self, request: RecallRequest, run: Sequence[Entry]) -> None:
        """Pins the next blocks of the request's run, which are RESIDENT."""
        self._arena.pin(*run)
        if request.landed == len(request.pinned):
            request.landed += len(run)
        request.pinned += run
        request.promoted += bytes(len(run))

    def cut(self, request: RecallRequest, blocks: int) -> None:
        """Only the first `blocks` of the request's run stay pinned."""
        while len(request.pinned) > blocks:
            request.promoted.pop()
            self._unpin(request.pinned.pop())
            self._news.changed = True  # there is room

    def free(self, request: RecallRequest, blocks: int) -> None:
        """The pins of the first `blocks` of the request's run, which have landed, end."""
        self._unpin(*request.pinned[request.freed : blocks])
        self._news.changed |= request.freed < min(blocks, len(request.pinned))
        request.freed = max(request.freed, min(blocks, len(request.pinned)))

    def let_go(self, request: RecallRequest, *, at_once: bool) -> None:
        """Ends the request's pins; those of a long run in slices, unless `at_once`."""
        self.leaving.add(request)
        if at_once or len(request.pinned) - request.freed <= AT_ONCE:
            deque(self._let_go(request), maxlen=0)
        else:
            self._work.add(self._let_go(request))

    def _let_go(self, request: RecallRequest) -> Work:
        while len(request.pinned) > request.freed:
            last = request.pinned[max(request.freed, len(request.pinned) - AT_ONCE) :]
            del request.pinned[-len(last) :]
            self._unpin(*reversed(last))
            yield len(last)
        self.leaving.discard(request)
        self._news.changed = True

    def _unpin(self, *run: Entry) -> None:
        self._arena.unpin(*run)
        for entry in run:
            if entry.state is BlockState.FILLING and not entry.pins:
                self._stack.unwanted(entry)


def _streams(session: Session) -> Iterator[RecallRequest]:
    """The requests that are streams, the oldest first."""
    return (transfer.stream.request for transfer in session.transfers.values() if transfer.stream is not None)
