"""The well as one single-threaded state machine: messages and completions in, messages and jobs out.

No locks, no threads, no sleeping. Everything that blocks is a job of the injected executor; everything long is cut into
slices that `turn` runs. The same class runs in the well's process, in-process for libraries and tests, and under an
executor that reorders, delays and fails completions.

    join / handle / left / exited  ──►  roster · recalls · spills  ──►  arena ──jobs──► executor
                                             │
                                             └──► member.send
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from stepwell import events as e
from stepwell.block.layout import SlabLayout
from stepwell.block.namespace import BlockId
from stepwell.block.state import State
from stepwell.errors import ConfigError, ProtocolError, StepwellError
from stepwell.events import Event, Sink
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.entry import Entry
from stepwell.hierarchy.arena.slab import Slab
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.counters import Counters, Ghosts
from stepwell.hierarchy.levels.costs import Calibrations, Costs
from stepwell.hierarchy.levels.mover import MOST_BATCH
from stepwell.hierarchy.levels.stack import TierStack
from stepwell.hierarchy.limits import Limits
from stepwell.hierarchy.pauses import KINDS, Kind, Pause, Pauses
from stepwell.hierarchy.requests import clearing
from stepwell.hierarchy.requests.decisions import Decisions
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.requests.spills import Spills
from stepwell.hierarchy.requests.weighing import Weighing
from stepwell.hierarchy.sessions.canaries import MOST_ERRORS, Canaries, Tags
from stepwell.hierarchy.sessions.roster import Roster
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Member, Peer, Phase, Quarantine, Send, Session, Ticket
from stepwell.hierarchy.sessions.shares import OVERHEAD, Held, Shares
from stepwell.hierarchy.work import Step, Work, WorkQueue
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.memory import Memory
from stepwell.policies.catalog import POLICIES, Policy
from stepwell.policies.decide import Mode
from stepwell.policies.placement.base import Placement
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.through import Through
from stepwell.protocol import messages as m
from stepwell.tiers.base import Tier
from stepwell.tiers.null import NullTier

MAX_RESERVE = 256
"""Blocks in one Reserve."""

MAX_TICKETS = 4096
"""Requests of one session that may be waiting, and as many that may be copying."""


class Hierarchy:
    """`tier`: where blocks go below the arena; it answers on this thread. `judge` checks what a joining engine wished
    for: returns warnings, raises ConfigError for nonsense. `barred`: namespaces that were in quarantine at an earlier
    well's end; `keep` is told whenever they change, and must not block. `entropy(n)`: n random bytes, for numbers of
    sessions. `recall`: how requests without a wish of their own are decided. `write`: when blocks are written to the
    tier; None: at once. `prefetch`: they are brought up from it before anybody asks for them. `calibrations`: costs of
    prefill that an earlier well had learned, by the namespace's tag; `learned` is told of them now and then, and must
    not block. `tenants`: how many share this well. `paused`: what was paused at an earlier well's
    end; `keep_paused` is told whenever somebody asks to pause or resume, and must not block."""

    def __init__(
        self,
        *,
        limits: Limits,
        sealing: Sealing,
        clock: Clock,
        executor: Executor,
        memory: Memory,
        well: str,
        tier: Tier | None = None,
        judge: Callable[[Mapping[str, str | int | float]], list[str]] = lambda wishes: [],
        sink: Sink = lambda event: None,
        barred: Iterable[Tags] = (),
        keep: Callable[[Sequence[Tags]], None] = lambda barred: None,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        recall: Mode = Mode.DEFAULT,
        policy: Callable[[], Policy] = POLICIES["default"],
        placement: Placement | None = None,
        write: WritePolicy | None = None,
        prefetch: bool = False,
        calibrations: Calibrations | None = None,
        learned: Callable[[Calibrations], None] = lambda costs: None,
        tenants: int = 1,
        paused: Iterable[Pause] = (),
        keep_paused: Callable[[Sequence[Pause]], None] = lambda paused: None,
    ) -> None:
        self._clock = clock
        self.judge = judge
        self._started = clock.now()
        self.well = well
        self.limits = limits
        self.counters = Counters()
        self.decisions = Decisions()
        self._sink = sink
        self.pauses = Pauses(self._emit, paused, keep_paused)
        self._core = Core(clock, limits, self._emit, self.pauses, WorkQueue(clock))
        self._work, self._news = self._core.work, self._core.news
        self._ghosts = Ghosts()
        self.shares = Shares(tenants)
        self.held = Held(self.shares)
        self.roster = Roster(clock, self.shares, sealing, entropy)
        self.canaries = Canaries(clock, self._emit, barred, keep)
        self.arena = Arena(
            limits.host_bytes,
            memory,
            executor.submit,
            _ArenaWatch(self),
            clock,
            slab_bytes=limits.slab_bytes,
            policy=policy,
            placement=placement,
        )
        below = NullTier() if tier is None else tier
        costs = Costs(clock, below.name, max(1, limits.readers) * MOST_BATCH, calibrations, learned)
        self.stack = TierStack(
            self._core, self.arena, below, sealing, self.canaries, costs, write or Through(), prefetch=prefetch
        )
        self._weighing = Weighing(self._core, costs, self.stack.mover, recall)
        self._recalls = Recalls(
            self._core, self.arena, self.stack, self._weighing, self.canaries, self._ghosts, self.held
        )
        self._spills = Spills(self._core, self.arena, self.stack, self.canaries)

    @property
    def index(self) -> Mapping[BlockId, Entry]:
        """The blocks that can be found in host memory, by id."""
        return self._core.index.entries

    # members ----------------------------------------------------------------------------------------------------------

    def join(self, peer: Peer, hello: m.Hello, send: Send, close: Callable[[], None]) -> Member | None:
        """Takes a connection in and answers it. None: it was refused and is to be closed."""
        member: Member | None = None
        try:
            warnings = self.judge(hello.wishes) if hello.wishes else []
            member = self.roster.enter(peer, hello, send, close)
            session = member.session
            if session.complete:
                self._fits(hello.shard_bytes)
                self.roster.open(session)
        except StepwellError as error:
            refused = m.Refused(error.code, error.what, error.why, error.fix)
            if member is None:
                send(refused, ())
            else:
                for other in member.session.members:  # whoever joined last, all are to know why
                    other.send(refused, ())
                self._end(member.session, without=member)
            return None
        for old in self.roster.disowned(member):
            self._end(old)
        for quarantine in self.roster.acknowledged(member):
            self._cleanse(quarantine)
        for number in self.roster.unmapped(member):
            self.arena.let_go(number)
        if member.is_scheduler and self.pauses.spills:
            warnings.append("spills are paused by the well's operator: nothing is added to what is cached")
        send(m.Welcome(session.number, m.PROTOCOL, self.well, self.limits.host_bytes, warnings), ())
        if session.phase is Phase.LIVE:
            self._open(session)
        return member

    def _fits(self, shard_bytes: int) -> None:
        if not SlabLayout.within(self.limits.host_bytes, shard_bytes, self.limits.slab_bytes).slots:
            raise ConfigError(
                "SW-107",
                what=f"a host tier of {self.limits.host_bytes} bytes cannot hold one shard of {shard_bytes} bytes",
                why="a slot holds a whole shard of a block",
                fix="raise `host` of the well, or lower the connector's `block_tokens`",
            )

    def _open(self, session: Session) -> None:
        assert session.owner is not None
        for slab in self.arena.serving(session.owner):
            self._share_with(session, slab)
        self.arena.came(session.owner)
        assert session.scheduler is not None
        self._emit(e.SessionOpened(session.number, session.scheduler.label, len(session.workers)))
        for member in session.members:
            member.send(m.Ready(session.number), ())

    def left(self, member: Member) -> None:
        """The member's connection has ended: so has its session, for all its members."""
        self._end(member.session, without=member)

    def exited(self, member: Member) -> None:
        """The member's process has exited: it copies no more."""
        freed = self.roster.exited(member)
        self._end(member.session, without=member)
        for quarantine in freed:
            self._cleanse(quarantine)
        self.arena.let_go(member.number)

    def _end(self, session: Session, without: Member | None = None) -> None:
        """`without`: the member whose connection has ended or is ended by the caller."""
        if session.phase is Phase.ENDED:
            return
        quarantine = self.roster.leave(session)
        for number in list(session.tickets):
            self._recalls.release(session, number, at_once=True)
        for number, fill in list(session.fills.items()):
            still_written = quarantine is not None and bool(fill.missing)
            self._spills.abandon(session, number, quarantine=still_written)
            if quarantine is not None and still_written:
                quarantine.slots.extend(fill.entry.slots)
        for transfer in session.transfers.values():
            if quarantine is not None:
                quarantine.entries.extend(transfer.entries)
            else:
                for entry in transfer.entries:
                    self.arena.release(entry)
        session.transfers.clear()
        if session.owner is not None and all(s.owner != session.owner for s in self.roster.sessions.values()):
            self.arena.gone(session.owner)
        self._news.freed = True
        if quarantine is not None and not (quarantine.slots or quarantine.entries):
            self.roster.quarantines.remove(quarantine)
        self._emit(e.SessionEnded(session.number, len(quarantine.slots) if quarantine is not None else 0))
        for member in session.members:
            for slab in self.arena.serving(session.owner) if session.owner else ():
                slab.mapped.discard(member.number)
            if member.number in self.roster.keeping and not self.arena.keeps(member.number):
                del self.roster.keeping[member.number]
            if member is not without:
                member.close()

    def _cleanse(self, quarantine: Quarantine) -> None:
        self.arena.cleanse(quarantine.slots)
        for entry in quarantine.entries:
            self.arena.release(entry)
        self._news.changed = True

    # slabs ------------------------------------------------------------------------------------------------------------

    def _share(self, slab: Slab) -> None:
        self._emit(e.SlabServing(slab.layout.nbytes))
        for session in self.roster.sessions.values():
            if session.phase is Phase.LIVE and session.owner == slab.owner:
                self._share_with(session, slab)

    @staticmethod
    def _share_with(session: Session, slab: Slab) -> None:
        layout = slab.layout
        message = m.SlabShared(slab.number, layout.nbytes, layout.offset, layout.stride, layout.slots)
        for member in session.workers.values():
            if member.hello.pins:
                slab.keepers.add(member.number)
            member.send(message, (slab.memory.fd,))

    def _unshare(self, slab: Slab) -> None:
        self._emit(e.SlabRetired(slab.layout.nbytes))
        for session in self.roster.sessions.values():
            if session.owner == slab.owner:
                for member in session.workers.values():
                    member.send(m.SlabRetired(slab.number), ())

    # messages ---------------------------------------------------------------------------------------------------------

    def handle(self, member: Member, message: m.FromEngine) -> None:
        """One message of a member. A message that its role or state does not allow ends the session."""
        session = member.session
        if session.phase is Phase.ENDED:
            return
        try:
            if m.overlong(message):
                raise _too_much(message)
            if member.is_scheduler:
                self._from_scheduler(session, message)
            else:
                self._from_worker(session, member, message)
        except ProtocolError as error:
            self._emit(e.MessageRefused(session.number, error.code, error.what))
            member.send(m.Refused(error.code, error.what, error.why, error.fix), ())
            self._end(session, without=member)
            member.close()

    def _from_scheduler(self, session: Session, message: m.FromEngine) -> None:
        if session.phase is not Phase.LIVE and not isinstance(message, m.Report):
            raise _not_now(message)
        match message:
            case m.Ask(ticket=number, digests=digests):
                if len(digests) % 32 or number in session.tickets or len(session.tickets) >= MAX_TICKETS:
                    raise _not_now(message)
                if not self.held.take(session, len(digests)):
                    self._recalls.decline(session, message)
                    return
                self._work.add(self._recalls.ask(session, message))
                if self._weighing.mode(message.recall) is not Mode.NEVER:
                    self.stack.asked(session, message.epoch, digests)
            case m.Recall(transfer=number, first=first, count=blocks):
                if number in session.transfers or len(session.transfers) >= MAX_TICKETS or first < 0 or blocks < 0:
                    raise _not_now(message)
                self._recalls.recall(session, message)
            case m.Release(ticket=number, waited_s=waited_s):
                self._recalls.release(session, number, waited_s)
            case m.Reserve(digests=digests):
                if len(digests) % 32 or len(digests) > 32 * MAX_RESERVE:
                    raise _not_now(message)
                if not self.held.take(session, len(digests)):
                    self._spills.refuse(session, message, "queue_full")
                    return
                self._work.add(self._holding(session, len(digests), self._spills.reserve(session, message)))
            case m.Abandon(leases=leases):
                ended = [self._spills.abandon(session, lease, quarantine=False) for lease in leases]
                self._news.changed |= any(ended)
            case m.Forget(digests=digests):
                nbytes = len(digests) + OVERHEAD
                if session.forgetting + nbytes > 32 * m.MAX_DIGESTS + OVERHEAD:
                    raise _too_much(message)
                session.forgetting += nbytes
                self._work.add(self._forget(session, message))
            case m.Canary(epoch=epoch, kind=kind, errors=errors):
                if not 0 < len(errors) <= MOST_ERRORS:
                    raise _not_now(message)
                self._heard(session, epoch, kind, errors)
            case m.Report(counts=counts):
                self._emit(e.EngineReported(counts))
            case m.Timings(steps=steps, copies=copies):
                self.stack.costs.heard(session.tag, steps, copies)
            case _:
                raise _not_now(message)

    def _from_worker(self, session: Session, member: Member, message: m.FromEngine) -> None:
        match message:
            case m.Mapped(slab=number):
                slab = self._slab_of(session, number)
                if slab is not None and member.number not in slab.mapped:
                    slab.mapped.add(member.number)
                    self._work.slabs_changed()
                    self._news.changed = True
            case m.Unmapped(slab=number):
                slab = self._slab_of(session, number)
                if slab is not None:
                    if slab.retirement is None:
                        raise _not_now(message)
                    self.arena.unmapped(member.number, slab)
            case m.Filled(leases=leases, dropped=dropped):
                if self._spills.filled(session, member.hello.rank, leases, dropped):
                    self._news.changed = True
            case m.Recalled(transfers=transfers):
                self._recalls.recalled(session, member.hello.rank, transfers)
            case _:
                raise _not_now(message)

    def _slab_of(self, session: Session, number: int) -> Slab | None:
        slab = self.arena.slab(number)
        return slab if slab is not None and slab.owner == session.owner else None

    def _holding(self, session: Session, nbytes: int, work: Work) -> Work:
        yield from work
        self.held.give(session, nbytes)

    def _forget(self, session: Session, message: m.Forget) -> Work:
        for at in range(0, len(message.digests) - 31, 32):
            if session.phase is not Phase.LIVE:
                return
            for origin in session.origins(message.epoch):
                id = origin.name(message.digests[at : at + 32])
                self.stack.mover.tier.drop(id)
                entry = self._core.index.find(id)
                if entry is not None and entry.state is State.RESIDENT:
                    self.arena.drop(entry, "failed_check")
            yield Step.DONE
        session.forgetting -= len(message.digests) + OVERHEAD

    def _heard(self, session: Session, epoch: int, kind: str, errors: list[float]) -> None:
        origins = session.origins(epoch)
        if self.canaries.heard(session.tenant, origins, kind, errors):
            for origin in origins:
                self._clear(self.tiers, origin.tag, lambda sums: None)

    def _emit(self, event: Event) -> None:
        self.counters(event)
        self.decisions(event)
        self._sink(event)

    # work -------------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One slice of pending work; True if more is waiting."""
        if self._news.any:
            self._recalls.look()
        if (due := self.arena.next_moment) is not None and due <= self._clock.now():
            self.arena.serve_queue()
        if (due := self.roster.next_moment) is not None and due <= self._clock.now():
            for session in self.roster.overdue():
                self._end(session)
        self.stack.turn()
        self.arena.tidy()
        self._work.turn()
        return self._work.more or self._news.any or self.arena.former.too_many

    # a well's beginning and end ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finds what an earlier life left in the tier, in the background. Call once, at first."""
        self.stack.recover()

    def drain(self, done: Callable[[], None]) -> None:
        """Nobody is connected any more: what is still to be written is written, and `done` is called when the tier has
        it in its best form. Call `turn` and deliver completions meanwhile."""
        self.stack.drain(done)

    # what an operator asks --------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> frozenset[str]:
        """Names of those that keep blocks."""
        return frozenset({clearing.HOST, self.stack.mover.tier.name} if self.stack.mover.keeps else {clearing.HOST})

    def clear(self, tiers: frozenset[str], namespace: bytes, done: clearing.Cleared) -> None:
        """Drops the blocks of these tiers; of one `namespace`, by its tag, or empty for all. `done` is called from
        `turn`, with what went. Tiers that are not there are left out. Cleared from all, it leaves quarantine."""
        if tiers >= self.tiers:
            self.canaries.lift(namespace)
        self._clear(tiers, namespace, done)

    def _clear(self, tiers: frozenset[str], namespace: bytes, done: clearing.Cleared) -> None:
        def cleared(sums: dict[str, clearing.Sum]) -> None:
            self._news.changed = True
            done(sums)

        if self.stack.mover.tier.name in tiers:
            self.stack.cleared(namespace)
        clear = clearing.Clearing(self.arena, self.stack.mover, tiers & self.tiers, namespace, self._work, cleared)
        self._work.walk(clear.run())

    def pause(self, pause: Pause) -> None:
        """From now on nothing of this kind begins; what has begun goes its way to the end."""
        if self.pauses.pause(pause):
            if pause.kind == "recalls":
                self._work.add(self._recalls.pause(list(self.roster.sessions.values())))
            else:
                self._work.slabs_changed()  # who is parked for one is answered now

    def resume(self, kind: Kind, uid: int) -> None:
        if self.pauses.resume(kind, uid) and kind == "spills":
            self.stack.spills_resumed()

    def behave(
        self, *, recall: Mode, placement: Placement, write: WritePolicy, prefetch: bool, pin_waiting: float
    ) -> None:
        """As the parameters of the same names, from now on."""
        self._weighing.follow(recall)
        self._recalls.follow(pin_waiting)
        self.arena.follow(placement)
        self.stack.follow(write, prefetch=prefetch)

    def count_namespaces(self, done: Callable[[dict[bytes, clearing.NamespaceSum]], None]) -> None:
        """`done` is called from `turn`, with what each namespace holds in host memory, by its tag."""
        sessions = list(self.roster.sessions.values())
        self._work.walk(clearing.count(self.arena, sessions, self.canaries.barred, done))

    # looking ----------------------------------------------------------------------------------------------------------

    @property
    def holds_blocks(self) -> bool:
        """There is something in host memory that would be lost with it."""
        return self.arena.blocks > 0

    @property
    def idle(self) -> bool:
        """Nothing that an engine has said waits to be done."""
        return self._work.idle

    def watches(self, member: Member) -> bool:
        """It still matters when this member's process exits."""
        numbers = {n for quarantine in self.roster.quarantines for n in quarantine.alive.values()}
        kept = member.number in self.roster.keeping and self.arena.keeps(member.number)
        return member.session.phase is not Phase.ENDED or member.number in numbers or kept

    @property
    def next_moment(self) -> float | None:
        """When time alone gives `turn` something to do; None: never."""
        parts = (self._work, self.stack, self.arena, self.roster)
        return min((moment for part in parts if (moment := part.next_moment) is not None), default=None)

    @property
    def leaving(self) -> Collection[Ticket]:
        """Tickets that have ended and still hold pins."""
        return self._recalls.leaving

    @property
    def sessions(self) -> int:
        return len(self.roster.sessions)

    def stats(self) -> dict[str, int | float | str]:
        """A flat table of what is held and what was counted since the start."""
        return {
            "well": self.well,
            "uptime_s": round(self._clock.now() - self._started, 3),
            "sessions": self.sessions,
            "quarantined_sessions": len(self.roster.quarantines),
            "quarantined_namespaces": len(self.canaries.barred),
            **self._paused(),
            "host_bytes": self.limits.host_bytes,
            **self.arena.count(),
            **self.counters.values(),
            **self.stack.mover.count(),
            "trouble": str(self.arena.trouble or ""),
            "paused": "; ".join(map(str, self.pauses.all)),
        }

    def stats_of(self, tenant: str) -> dict[str, int | float | str]:
        """What one tenant may know: nothing in it depends on what the others hold or do."""
        sessions = sum(session.tenant == tenant for session in self.roster.sessions.values())
        return {
            "well": self.well,
            "uptime_s": round(self._clock.now() - self._started, 3),
            "tenant": tenant,
            "sessions": sessions,
            **self._paused(),
            "host_bytes": self.limits.host_bytes,
        }

    def _paused(self) -> dict[str, int]:
        paused = [pause.kind for pause in self.pauses.all]
        return {f"paused_{kind}": int(kind in paused) for kind in KINDS}

    def close(self) -> None:
        """Ends all sessions and frees all shared memory. No job may be running any more."""
        for session in list(self.roster.sessions.values()):
            self._end(session, without=session.members[0])
            session.members[0].close()
        self.arena.close()
        self.stack.close()


class _ArenaWatch:
    """Passes on what the arena says to the parts that it concerns."""

    def __init__(self, well: Hierarchy) -> None:
        self._well = well

    def serving(self, slab: Slab | None) -> None:
        self._well._work.slabs_changed()
        if slab is None:
            self._well._news.changed = True  # nobody needs to wait until it is there
        else:
            self._well._share(slab)

    def retired(self, slab: Slab) -> None:
        self._well._news.changed = True  # nobody needs to wait until it is mapped
        self._well._unshare(slab)

    def dropped(self, entry: Entry, reason: str) -> None:
        well, evicted = self._well, reason in ("evicted", "retired")
        well._core.index.remove(entry)
        well._emit(e.BlockDropped(reason))
        if evicted:
            well._ghosts.add(entry.id)
        well.stack.left(entry, evicted=evicted)

    def troubled(self, error: StepwellError) -> None:
        self._well._emit(e.ArenaTroubled(str(error)))


def _too_much(message: m.FromEngine) -> ProtocolError:
    return ProtocolError(
        "SW-802",
        what=f"a {type(message).__name__} that is too long",
        why="no engine has so much to say at a time",
        fix="use the same stepwell version for engine and well",
    )


def _not_now(message: m.FromEngine) -> ProtocolError:
    return ProtocolError(
        "SW-804",
        what=f"a {type(message).__name__} that is not allowed here or now",
        why="its sender's role or the session's state does not have it",
        fix="use the same stepwell version for engine and well",
    )
