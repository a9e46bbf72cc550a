"""Answering requests: follow a prefix through the index, pin what is resident, lease what is recalled.

A ticket's life:   Ask -> followed in slices -> Found ... Found(final) -> Recall (pins become leases) or Release
Where a run cannot grow yet (a block that the session itself is filling, a slab not mapped everywhere, no room for
pins) the ticket waits and is followed again when something changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stepwell.block.namespace import BlockId, Namer
from stepwell.block.state import State
from stepwell.events import BlocksRecalled, RunAnswered, Sink
from stepwell.hierarchy.arena import Arena
from stepwell.hierarchy.counters import Ghosts
from stepwell.hierarchy.entry import Entry
from stepwell.hierarchy.limits import Limits
from stepwell.hierarchy.session import Phase, Session, Ticket, Transfer
from stepwell.hierarchy.work import Step, Work
from stepwell.protocol.messages import Ask, Found, GiveWay, Recall

SLICE = 128
"""Blocks told in one Found: bounds how long building it takes."""

AT_ONCE = 32
"""Pins let go without giving others a turn."""


class Recalls:
    def __init__(
        self,
        arena: Arena,
        index: dict[BlockId, Entry],
        limits: Limits,
        emit: Sink,
        ghosts: Ghosts,
        namers: Callable[[Session, int], tuple[Namer, ...]],
        later: Callable[[Work], None],
    ) -> None:
        self._arena = arena
        self._index = index
        self._limits = limits
        self._emit = emit
        self._ghosts = ghosts
        self._namers = namers
        self._later = later
        self.leaving: set[Ticket] = set()  # ended, and their pins are being let go
        self._waiting: dict[Ticket, Session] = {}
        self.changed = False  # something happened that a waiting ticket may have waited for

    def ask(self, session: Session, message: Ask) -> Work:
        ticket = Ticket(message.ticket, message.order, message.epoch, message.digests)
        session.tickets[ticket.number] = ticket
        return self._follow(session, ticket)

    def retry(self) -> list[Work]:
        """Work for the tickets that waited, earliest request first."""
        self.changed = False
        again = sorted(self._waiting.items(), key=lambda pair: pair[0].order)
        self._waiting.clear()
        for ticket, _ in again:
            ticket.queued = True
        return [self._follow(session, ticket) for ticket, session in again]

    def _follow(self, session: Session, ticket: Ticket) -> Work:
        namers = self._namers(session, ticket.epoch)
        while True:
            if session.phase is not Phase.LIVE or session.tickets.get(ticket.number) is not ticket:
                return
            at = len(ticket.pinned)
            if at == ticket.blocks:
                reason, waits = "end", False
                break
            entry, id = self._find(namers, ticket.digests[32 * at : 32 * at + 32])
            reason, waits = self._obstacle(session, ticket, entry, id)
            if entry is None or reason:
                break
            self._arena.pin(entry)
            ticket.pinned.append(entry)
            if len(ticket.pinned) - ticket.told >= SLICE:
                self._tell(session, ticket, more=True)
            yield Step.DONE
        ticket.queued = False
        new_wait = reason if waits else ""
        if waits:
            self._waiting[ticket] = session
        if len(ticket.pinned) > ticket.told or not waits or new_wait != ticket.waiting:
            ticket.waiting = new_wait
            self._tell(session, ticket, more=waits, reason=reason)
        if not waits:
            self._emit(RunAnswered(len(ticket.pinned), ticket.blocks - len(ticket.pinned), reason))

    def _find(self, namers: tuple[Namer, ...], digest: bytes) -> tuple[Entry | None, BlockId]:
        """The block under the tenant's newest key epoch, else under an older one; what it is called now if it is not
        here."""
        ids = [namer.name(digest) for namer in namers]
        for id in ids:
            entry = self._index.get(id)
            if entry is not None:
                return entry, id
        return None, next((id for id in ids if id in self._ghosts), ids[0])

    def _obstacle(self, session: Session, ticket: Ticket, entry: Entry | None, id: BlockId) -> tuple[str, bool]:
        """Why this block cannot be added to the run ("" if it can), and whether waiting may help."""
        if entry is None:
            return ("evicted" if id in self._ghosts else "never_seen"), False
        if entry.state is State.FILLING:
            return "filling", id in session.filling
        for slab, _ in entry.slots:
            if not session.copiers <= slab.mapped:
                return "mapping", True
        if not entry.pins and not self._room(ticket, entry):
            self._ask_way(session, ticket)
            return "pins", True
        return "", False

    def _room(self, ticket: Ticket, entry: Entry) -> bool:
        would = self._arena.pinned_bytes + entry.nbytes
        if would <= self._limits.pin_waiting * self._limits.host_bytes:
            return True
        alone = self._arena.pins == len(ticket.pinned)
        return alone and would <= self._limits.pin_request * self._limits.host_bytes

    @staticmethod
    def _ask_way(session: Session, ticket: Ticket) -> None:
        """Asks the session's last request in line that holds pins to give way to this earlier one."""
        later = [t for t in session.tickets.values() if t.order > ticket.order and t.pinned and not t.asked_way]
        if later and session.scheduler is not None:
            last = max(later, key=lambda t: t.order)
            last.asked_way = True
            session.scheduler.send(GiveWay(last.number), ())

    def _tell(self, session: Session, ticket: Ticket, *, more: bool, reason: str = "") -> None:
        news = ticket.pinned[ticket.told :]
        self._arena.touch(news)
        if session.scheduler is not None:
            found = Found(ticket.number, ticket.told, b"".join(e.refs for e in news), more, reason)
            session.scheduler.send(found, ())
        ticket.told = len(ticket.pinned)

    def recall(self, session: Session, message: Recall) -> None:
        """Pins become leases. A ticket that is gone means a copy that will fail its generation check, or not: the
        bytes are then still those it was told of."""
        ticket = session.tickets.get(message.ticket)
        if ticket is None:
            return
        entries = ticket.pinned[message.first : message.first + message.count]
        for entry in entries:
            self._arena.lease(entry)
        self.release(session, message.ticket)
        ranks = {m.hello.rank for m in session.workers.values()}
        session.transfers[message.transfer] = Transfer(entries, ranks)
        self._emit(BlocksRecalled(len(entries), sum(e.nbytes for e in entries)))

    def recalled(self, session: Session, rank: int, transfers: list[int]) -> None:
        for number in transfers:
            transfer = session.transfers.get(number)
            if transfer is None:
                continue
            transfer.missing.discard(rank)
            if not transfer.missing:
                del session.transfers[number]
                for entry in transfer.entries:
                    self._arena.release(entry)

    def release(self, session: Session, number: int, *, at_once: bool = False) -> None:
        """Ends a ticket. A long run's pins are let go in slices, unless `at_once`."""
        ticket = session.tickets.pop(number, None)
        if ticket is None:
            return
        self._waiting.pop(ticket, None)
        self.leaving.add(ticket)
        if at_once or len(ticket.pinned) <= AT_ONCE:
            deque(self._let_go(ticket), maxlen=0)
        else:
            self._later(self._let_go(ticket))

    def _let_go(self, ticket: Ticket) -> Work:
        while ticket.pinned:
            self._arena.unpin(ticket.pinned.pop())
            yield Step.DONE
        self.leaving.discard(ticket)
        self.changed = True
