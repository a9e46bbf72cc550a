"""The scheduler's member: asks for prefixes, reserves slots, and keeps the answers where a hook can read them.

Hooks of the engine call in from its scheduler thread and never wait for the well: they post, and read a local map that
the link's thread fills. The only wait is in `settle`: at most a millisecond, since an answer on its way saves a step.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count

import numpy as np

from stepwell.client.identity import EngineIdentity
from stepwell.client.membership import Membership, Trouble
from stepwell.client.patience import PATIENCE, UNANSWERED_S, Patience, cap
from stepwell.client.questions import FOR_ROOM, IN_LINE, MAX_ASKS, BlocksQuestion, PrefixQuestion, SlotRefs, Spill
from stepwell.client.streams import StreamLimits
from stepwell.errors import as_error
from stepwell.protocol import messages as m
from stepwell.protocol.link import Dial

MAX_RESERVED = 256
"""Blocks in one Reserve; the well refuses more."""


class SchedulerClient:
    """One per engine. `weights` returns None until the fingerprint is known: until then there is no session."""

    def __init__(
        self,
        identity: EngineIdentity,
        weights: Callable[[], bytes | None],
        find: Callable[[], Dial],
        *,
        options: dict[str, str | int | float] | None = None,
        trouble: Trouble,
        joined: Callable[[m.Welcome], None] = lambda welcome: None,
        counted: Callable[[str, int], None] = lambda name, n: None,
        patience: Patience = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        self._identity = identity
        self._weights = weights
        self._options = options or {}
        self._joined = joined
        self._counted = counted
        self._patience = patience
        self._clock = clock
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._asks: dict[int, PrefixQuestion] = {}
        self._looks: dict[int, BlocksQuestion] = {}
        self._streams: set[int] = set()  # transfers
        self._spills: dict[int, Spill] = {}
        self._counts: Counter[str] = Counter()
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=m.MAX_TIMINGS)
        self._copies: deque[tuple[int, float]] = deque(maxlen=m.MAX_TIMINGS)
        self._reported = 0.0
        self.tiers: tuple[str, ...] = ()  # as the well names them, the host tier first
        self._silent = False  # a request was told nothing at all for as long as it could wait
        self._flags: frozenset[str] = frozenset()  # of the well
        self.session = 0  # 0: none, or not complete yet
        self.membership = Membership(self._hello, find, self, trouble)
        self.membership.begin(threaded=threaded)

    def _hello(self) -> m.Hello | None:
        weights = self._weights()
        return None if weights is None else self._identity.hello(weights, self._options)

    # what the engine's hooks call -------------------------------------------------------------------------------------

    def ask(
        self, digests: bytes, epoch: int, order: int, tokens: int = 0, recall: str = "", prefix: int = 0
    ) -> PrefixQuestion | None:
        """Posts the question; None while there is no session, or when too many wait. The answer grows in the returned
        object. `tokens`: of the prompt; `recall`: the request's own mode, if it has one; `prefix`: see `Ask`."""
        session = self.session
        if not session or not digests or len(self._asks) + len(self._looks) >= MAX_ASKS:
            return None
        ask = PrefixQuestion(next(self._numbers), session, self._clock())
        with self._lock:
            self._asks[ask.ticket] = ask
        if not self._post(session, m.Ask(ask.ticket, epoch, order, digests, tokens, recall, prefix)):
            with self._lock:
                self._asks.pop(ask.ticket, None)
            return None
        return ask

    def look(self, digests: bytes, epoch: int) -> BlocksQuestion | None:
        """Asks which of these blocks are there, and holds none of them; None while there is no session, when too many
        questions wait, or where the well does not know this one. The answer comes in the returned object."""
        session, waiting = self.session, len(self._asks) + len(self._looks)
        if not session or not digests or waiting >= MAX_ASKS or m.LOOKS not in self._flags:
            return None
        look = BlocksQuestion(next(self._numbers), len(digests) // 32)
        with self._lock:
            self._looks[look.ticket] = look
        if not self._post(session, m.Look(look.ticket, epoch, digests)):
            self.forget_look(look)
            return None
        return look

    def forget_look(self, look: BlocksQuestion) -> None:
        """Nobody wants its answer any more. Idempotent."""
        with self._lock:
            self._looks.pop(look.ticket, None)

    def settle(self, ask: PrefixQuestion, wait_s: float) -> bool:
        """True when the answer is final or waiting has become too long. Waits `wait_s` at most, on the first call.

        Blocks come up by turns, and pins are given by them; one that is overtaken has lost nothing. So a request in
        that line is stalled when it gets nothing and the well does not say that the line moves for it, and its total
        limit begins anew when one in the line has got all that it asked for; the first that does not lets the others go
        as well. What others find in host memory says nothing of its blocks and renews nothing. Nothing renews the cap:
        the total limit once for itself and once for each that is in the line with it at a time, a minute at most."""
        over = self._is_over(ask, wait_s)
        if over and not ask.settled:
            ask.settled = self._clock()
        return over

    def _is_over(self, ask: PrefixQuestion, wait_s: float) -> bool:
        now = self._clock()
        if not ask.first_poll:
            ask.first_poll = now
            with self._lock:
                others = sum(o.in_line for o in self._asks.values() if o is not ask) + len(self._streams)
                ask.sharing = max(ask.sharing, others)
            if not ask.final and wait_s > 0:
                with self._news:
                    self._news.wait_for(lambda: ask.final, wait_s)
        if ask.final:
            return True
        if not ask.answered:
            allow_s = 0.0 if self._silent else UNANSWERED_S
            over = self._patience.over(ask.first_poll, ask.news, now, allow_s, reading=not self._silent)
            self._silent = self._silent or over
            return over
        limit_s = self._patience.total(ask.limit_s, ask.known)
        if now - ask.first_poll >= cap(limit_s, ask.sharing):
            return True
        if ask.reason not in IN_LINE:
            return self._patience.over(ask.first_poll, ask.news, now, 0.0, limit_s)
        return self._patience.over(ask.first_poll, ask.news, now, ask.allow_s, limit_s, reading=True, turn=ask.turn)

    def _room_given(self) -> None:
        """A request in line has got something, or one ends and gives back what it had: those that wait for room are not
        stalled. Under the lock."""
        now = self._clock()
        for other in self._asks.values():
            other.news = now if other.reason in FOR_ROOM else other.news

    def _line_moved(self, message: m.LineMoved) -> None:
        now = self._clock()
        with self._lock:
            for ask in self._asks.values():
                if ask.reason in IN_LINE:
                    ask.sharing = max(ask.sharing, message.sharing - 1)
                    ask.turn = now if message.whole else ask.turn
                    ask.news = now if ask.ticket not in message.apart else ask.news

    def offer(self, ask: PrefixQuestion, *, streamed: bool = False) -> int:
        """Blocks that may be offered now; with `streamed` those too that have not landed yet and may fail to. Where
        there are any, the request's wait has ended, and its pins do not give way to other requests any more. None, and
        it is not `settled`: it has just given way, and waits again."""
        with self._lock:
            blocks = max(ask.blocks, ask.known) if streamed else ask.blocks
            ask.offered = blocks > 0
            if blocks and not ask.settled:
                ask.settled = self._clock()
            return blocks

    def recall(
        self, ask: PrefixQuestion, first: int, blocks: int, *, compare: bool = False, spare: int = 0
    ) -> tuple[int, SlotRefs]:
        """Leases blocks of an offered run: the transfer's number and where the shards lie, in the ask's session. Ends
        the ask. `compare`: they are only looked at; `spare`: see `Recall`."""
        transfer = next(self._numbers)
        refs = np.concatenate(ask.refs)[first : first + blocks]  # offered, so there are some, even of a lost session
        given = (ask.ticket, transfer, first, blocks, compare, ask.waited_s, False, ask.no_place, spare)
        self._post(ask.session, m.Recall(*given))
        with suppress(Exception), self._lock:  # who waits behind it may lose a renewal; its leases must not be lost
            self._asks.pop(ask.ticket, None)
            self._room_given()
        return transfer, refs

    def stream(self, ask: PrefixQuestion, first: int, blocks: int, spare: int = 0) -> tuple[int, StreamLimits]:
        """Recalls blocks of an offered run that have not all landed: the transfer's number, by which workers get them,
        and how long these are to wait. Ends the ask; `stream_ended` is to follow when all workers have done so."""
        transfer = next(self._numbers)
        self._post(ask.session, m.Recall(ask.ticket, transfer, first, blocks, False, ask.waited_s, True, None, spare))
        with self._lock:
            self._asks.pop(ask.ticket, None)
            self._streams.add(transfer)
        stall_s, total_s = self._patience.stall_s + self._patience.reading_s, self._patience.total(ask.limit_s, blocks)
        return transfer, StreamLimits(stall_s, total_s, ask.allow_s, ask.sharing, ask.waited_s, ask.turn_s)

    def stream_ended(self, transfer: int) -> None:
        """No worker waits for blocks of this stream any more. Idempotent."""
        with self._lock:
            if transfer in self._streams:
                self._streams.remove(transfer)
                self._room_given()

    def release(self, ask: PrefixQuestion) -> None:
        """The request needs no recall (any more). Idempotent."""
        with self._lock:
            known = self._asks.pop(ask.ticket, None)
            if known is not None and known.blocks:
                self._room_given()
        if known is not None:
            self._post(ask.session, m.Release(ask.ticket, ask.waited_s, no_place=ask.no_place))

    def finish(self, ask: PrefixQuestion) -> None:
        """The request needs no recall, but the well is to know that its blocks were used, and we which it has: released
        when the answer is final or would have to wait, which makes it final. Idempotent."""
        with self._lock:
            if not ask.final and not ask.reason:
                ask.unwanted = True
                return
            ask.final = True
        self.release(ask)

    def reserve(self, parent: bytes, digests: bytes, epoch: int, first: int = -1, depth: int = 0) -> Spill | None:
        """Asks for slots to fill; None while there is no session. At most MAX_RESERVED blocks. `first`: how many blocks
        come before them in their prefix, -1 where that is not known; `depth`: before parts of a tail."""
        session = self.session
        if not session:
            return None
        spill = Spill(next(self._numbers), session, len(digests) // 32)
        with self._lock:
            self._spills[spill.number] = spill
        if not self._post(session, m.Reserve(spill.number, epoch, parent, digests, first, depth)):
            with self._lock:
                self._spills.pop(spill.number, None)
            return None
        return spill

    def abandon(self, spill: Spill, first: int) -> None:
        """Its blocks from `first` on will not be given to a worker, granted already or not, or in this moment."""
        with self._lock:
            spill.cancelled = not spill.granted
            leases = [lease for lease in spill.leases[first:] if lease]
        if leases:
            self._post(spill.session, m.Abandon(leases))

    def forget(self, session: int, digests: bytes, epoch: int) -> None:
        """Blocks that failed their check when this session recalled them."""
        self._post(session, m.Forget(epoch, digests))

    def canary(self, session: int, epoch: int, kind: str, errors: list[float]) -> None:
        """What blocks of this session, computed once more, have shown."""
        self._post(session, m.Canary(epoch, kind, errors))

    def count(self, name: str, n: int = 1) -> None:
        """Counts what only the engine side sees, for the next `report`."""
        self._counts[name] += n
        self._counted(name, n)

    def timed(self, steps: Iterable[tuple[int, float, float]], copies: Iterable[tuple[int, float]]) -> None:
        """Notes how long steps and copies took, for the next `report`; the latest are told."""
        self._steps.extend(steps)
        self._copies.extend(copies)

    def report(self, *, idle: bool) -> None:
        """Tells the well what was counted and timed: once a second at most, and when the engine has nothing to do."""
        now = self._clock()
        if not (self._counts or self._steps or self._copies) or not (idle or now - self._reported >= 1.0):
            return
        if self._counts and self._post(self.session, m.Report(dict(self._counts))):
            self._reported = now
            self._counts.clear()
        if (self._steps or self._copies) and self._post(self.session, m.Timings(list(self._steps), list(self._copies))):
            self._reported = now
            self._steps.clear()
            self._copies.clear()

    @property
    def live(self) -> bool:
        """The session is complete: it may ask, reserve and recall."""
        return self.session != 0

    def _post(self, session: int, message: m.Message) -> bool:
        """Posts what belongs to this session, if it is still the present one: what numbers and leases of another mean,
        only that one knew. False when it was not posted."""
        outbox = self.membership.outbox
        if outbox is None or not session or session != self.session:
            return False
        outbox.post(message)
        return True

    def close(self) -> None:
        self.report(idle=True)
        self.membership.close()

    # what the link's thread calls -------------------------------------------------------------------------------------

    def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
        match message:
            case m.Found():
                self._found(message)
            case m.Seen(ticket=number, here=here):
                with self._lock:
                    if (look := self._looks.pop(number, None)) is not None:
                        look.here = here
            case m.Granted():
                self._granted(message)
            case m.LineMoved():
                self._line_moved(message)
            case m.GiveWay(ticket=number, reason=reason):
                self._give_way(number, reason)
            case m.Ready(session=number):
                self.session = number
                self.membership.settled()
            case m.Welcome(tiers=tiers, flags=flags):
                self.tiers, self._flags = tuple(tiers), frozenset(flags)
                self._joined(message)
            case m.Refused(code=code, what=what, why=why, fix=fix):
                self.membership.trouble(as_error(code, what, why, fix))
            case _:
                pass

    def _found(self, found: m.Found) -> None:
        rows = np.frombuffer(found.slots, m.SLOT_REF).reshape(-1, self._identity.shards)
        with self._news:
            ask = self._asks.get(found.ticket)
            if ask is None:
                return
            if len(rows):
                ask.refs.append(rows)
                ask.blocks += len(rows)
                ask.sources += found.sources
                ask.news = self._clock()
                if ask.lined_up:
                    self._room_given()
            ask.answered, self._silent = True, False
            ask.reason = found.reason or ask.reason  # a slice of a long answer names none
            ask.known, ask.ends, ask.lies = found.known, found.ends, found.lies
            ask.lined_up = ask.lined_up or found.reason in IN_LINE
            ask.allow_s, ask.limit_s = found.allow_s, found.limit_s
            ask.final = not found.more or (ask.unwanted and bool(found.reason))
            self._news.notify_all()
            over = ask.unwanted and ask.final
        if over:
            self.release(ask)

    def _granted(self, granted: m.Granted) -> None:
        with self._lock:
            spill = self._spills.pop(granted.spill, None)
            if spill is None:
                return
            spill.leases, spill.reason = granted.leases, granted.reason
            spill.refs = np.frombuffer(granted.slots, m.SLOT_REF).reshape(-1, self._identity.shards)
            spill.granted = True
            cancelled = spill.cancelled
        if cancelled:
            self._post(spill.session, m.Abandon([lease for lease in granted.leases if lease]))

    def _give_way(self, ticket: int, reason: str) -> None:
        """Lets go of what is known of the answer, for good where there is a reason. Else the request waits on, within
        the limits that it had: this is no news."""
        with self._lock:
            ask = self._asks.get(ticket)
            if ask is None or ask.offered:
                return
            waits = not (reason or ask.unwanted)
            ask.reason = "pins" if waits else reason or "gave_way"
            ask.blocks, ask.known, ask.ends, ask.final = 0, 0, "", not waits
            ask.refs.clear()
            ask.sources.clear()
            if waits:
                ask.lined_up, ask.settled = True, 0.0
            else:
                del self._asks[ticket]
        self._post(ask.session, m.Release(ticket, waits=waits))

    def lost(self) -> None:
        """The session is over: whoever still waits is answered with what is safe, nothing."""
        with self._news:
            self.session = 0
            for ask in self._asks.values():
                # What was offered this moment may still be taken by `recall`: the worker finds its session gone.
                ask.final, ask.reason, ask.blocks, ask.known, ask.ends = True, "well_lost", 0, 0, ""
            self._asks.clear()
            for look in self._looks.values():
                look.here = bytes(look.blocks)
            self._looks.clear()
            self._streams.clear()
            for spill in self._spills.values():
                # before `granted`, which others read without the lock
                spill.leases, spill.reason = [0] * spill.blocks, "well_lost"
                spill.granted = True
            self._spills.clear()
            self._news.notify_all()
