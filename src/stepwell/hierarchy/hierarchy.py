"""The well as one single-threaded state machine: messages and completions in, messages and jobs out.

No locks, no threads, no sleeping. Everything that blocks is a job of the injected executor; everything long is cut into
slices that `turn` runs. The same class runs in the well's process, in-process for libraries and tests, and under an
executor that reorders, delays and fails completions.

    join / left / exited  ──►  members  ──┐
    handle                ──►  dispatch ──┴──►  recalls · spills  ──►  arena · stack ──jobs──► executor
                                                      │
                                                      └──► member.send
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from stepwell import events as e
from stepwell.block.namespace import BlockId
from stepwell.block.tier import HOST
from stepwell.errors import StepwellError
from stepwell.events import Event, Sink
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry, Slab
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Core, Limits
from stepwell.hierarchy.counters import Counters, Ghosts
from stepwell.hierarchy.dispatch import Dispatch
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.reads import MAX_BATCH
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.members import Judge, Members
from stepwell.hierarchy.operator import Operator
from stepwell.hierarchy.pauses import KINDS, Pause, Pauses
from stepwell.hierarchy.requests.decisions import Decisions
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.requests.spills import Spills
from stepwell.hierarchy.requests.uses import AbsentUses
from stepwell.hierarchy.requests.weighing import Weighing
from stepwell.hierarchy.sessions.canaries import Canaries, Tags
from stepwell.hierarchy.sessions.costs import Calibrations, Costs
from stepwell.hierarchy.sessions.roster import Roster
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Channel, Member, Peer, Ticket
from stepwell.hierarchy.sessions.shares import Held, Shares
from stepwell.hierarchy.sessions.sharing import SlabSharing
from stepwell.hierarchy.work import WorkQueue
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.memory import Memory
from stepwell.policies.catalog import POLICIES, TierPolicy
from stepwell.policies.decide import Mode
from stepwell.policies.placement.base import Placement
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.through import Through
from stepwell.protocol.messages import FromEngine, Hello
from stepwell.tiers.base import Tier


class Hierarchy:
    """`tiers`: where blocks go below the arena, the uppermost first, each with a name of its own; they answer on this
    thread. `judge` checks what a joining engine wished
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
        tiers: Sequence[Tier] = (),
        judge: Judge = lambda wishes: [],
        sink: Sink = lambda event: None,
        barred: Iterable[Tags] = (),
        keep: Callable[[Sequence[Tags]], None] = lambda barred: None,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        recall: Mode = Mode.DEFAULT,
        policy: Callable[[], TierPolicy] = POLICIES["default"],
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
        self._started = clock.now()
        self.well = well
        self.limits = limits
        self.counters = Counters()
        self.decisions = Decisions()
        self._sink = sink
        self.pauses = Pauses(self._emit, paused, keep_paused)
        self._core = Core(clock, limits, self._emit, self.pauses, WorkQueue(clock))
        ghosts = Ghosts()
        self.shares = Shares(tenants)
        self.held = Held(self.shares)
        self.roster = Roster(clock, self.shares, sealing, entropy)
        self.canaries = Canaries(clock, self._emit, barred, keep)
        sharing = SlabSharing(self._core, self.roster)
        watch = _ArenaWatch(self, self._core, sharing, ghosts)
        self.arena = Arena(
            limits.host_bytes,
            watch,
            clock,
            policy=policy,
            placement=placement,
        )
        self.slabs = SlabPool(self.arena, memory, executor.submit, watch, clock, slab_bytes=limits.slab_bytes)
        self.costs = Costs(clock, max(1, limits.readers) * MAX_BATCH, calibrations, learned)
        self.stack = Stack(self._core, self.arena, tiers, sealing)
        self.migration = Migration(
            self._core, self.arena, self.slabs, self.stack, self.canaries, write or Through(), prefetch=prefetch
        )
        uses = AbsentUses(self.arena, self.costs)
        self._weighing = Weighing(self._core, self.costs, self.stack, recall)
        self._recalls = Recalls(
            self._core,
            self.arena,
            self.slabs,
            self.stack,
            self.migration,
            self._weighing,
            uses,
            self.canaries,
            ghosts,
            self.held,
        )
        self._spills = Spills(self._core, self.arena, self.slabs, self.stack, self.migration, uses, self.canaries)
        self.operator = Operator(
            self._core, self.arena, self.stack, self.migration, self._recalls, self.roster, self.canaries
        )
        self._members = Members(
            self._core,
            self.arena,
            self.slabs,
            self.roster,
            sharing,
            self._recalls,
            self._spills,
            well,
            judge,
            self.tiers,
        )
        self._dispatch = Dispatch(
            self._core,
            self.arena,
            self.slabs,
            self.stack,
            self.migration,
            self.costs,
            self._members,
            self.operator,
            self._recalls,
            self._spills,
            self._weighing,
            self.canaries,
            self.held,
        )

    @property
    def index(self) -> Mapping[BlockId, Entry]:
        """The blocks that can be found in host memory, by id."""
        return self._core.index.entries

    def _emit(self, event: Event) -> None:
        self.counters(event)
        self.decisions(event)
        self._sink(event)

    # engines ----------------------------------------------------------------------------------------------------------

    def join(self, peer: Peer, hello: Hello, channel: Channel) -> Member | None:
        """Takes a connection in and answers it. None: it was refused and is to be closed."""
        return self._members.join(peer, hello, channel)

    def handle(self, member: Member, message: FromEngine) -> None:
        """One message of a member. A message that its role or state does not allow ends the session."""
        self._dispatch.handle(member, message)

    def left(self, member: Member) -> None:
        """The member's connection has ended: so has its session, for all its members."""
        self._members.left(member)

    def exited(self, member: Member) -> None:
        """The member's process has exited: it copies no more."""
        self._members.exited(member)

    def watches(self, member: Member) -> bool:
        """It still matters when this member's process exits."""
        return self._members.watches(member)

    # work -------------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One slice of pending work; True if more is waiting."""
        if self._core.news.any:
            self._recalls.look()
        self.stack.pump_due()
        if (due := self.slabs.next_moment) is not None and due <= self._clock.now():
            self.slabs.serve_queue()
        self._members.end_overdue()
        self.migration.turn()
        self.arena.tidy()
        self._core.work.turn()
        return self._core.work.more or self._core.news.any or self.arena.former.too_many

    # a well's beginning and end ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finds what an earlier life left in the tier, in the background. Call once, at first."""
        self.stack.recover()

    def drain(self, done: Callable[[], None]) -> None:
        """Nobody is connected any more: what is still to be written is written, and `done` is called when the tier has
        it in its best form. Call `turn` and deliver completions meanwhile."""
        self.migration.drain(done)

    def follow(
        self,
        *,
        recall: Mode,
        placement: Placement,
        write: WritePolicy,
        prefetch: bool,
        pin_waiting: float,
        judge: Judge,
    ) -> None:
        """From now on it does as the parameters of the same names say."""
        self._members.follow(judge)
        self._weighing.follow(recall)
        self._recalls.pins.follow(pin_waiting)
        self.arena.follow(placement)
        self.migration.follow(write, prefetch=prefetch)

    # looking ----------------------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> list[str]:
        """Names of the host tier and of those below it."""
        return [HOST, *(level.name for level in self.stack.levels)]

    @property
    def holds_blocks(self) -> bool:
        """There is something in host memory that would be lost with it."""
        return self.arena.sums.blocks > 0

    @property
    def idle(self) -> bool:
        """Nothing that an engine has said waits to be done."""
        return self._core.work.idle

    @property
    def next_moment(self) -> float | None:
        """When time alone gives `turn` something to do; None: never."""
        parts = (self._core.work, self.stack, self.migration, self.slabs, self.roster)
        return min((moment for part in parts if (moment := part.next_moment) is not None), default=None)

    @property
    def leaving(self) -> Collection[Ticket]:
        """Tickets that have ended and still hold pins."""
        return self._recalls.pins.leaving

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
            "tiers": ",".join(self.tiers),
            "host_bytes": self.limits.host_bytes,
            **self.slabs.count(),
            **self.arena.count(),
            **self.counters.values(),
            **self.stack.count(),
            "trouble": str(self.slabs.trouble or ""),
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
            self._members.end(session, without=session.members[0])
            session.members[0].channel.sever()
        self.slabs.close()
        self.stack.close()


class _ArenaWatch:
    """Passes on what the arena says to the parts that it concerns. Some are made after the arena, so they are asked of
    the well."""

    def __init__(self, well: Hierarchy, core: Core, sharing: SlabSharing, ghosts: Ghosts) -> None:
        self._well = well
        self._core = core
        self._sharing = sharing
        self._ghosts = ghosts

    def serving(self, slab: Slab | None) -> None:
        self._core.work.slabs_changed()
        if slab is None:
            self._core.news.changed = True  # nobody needs to wait until it is there
        else:
            self._sharing.share(slab)

    def retired(self, slab: Slab) -> None:
        self._core.news.changed = True  # nobody needs to wait until it is mapped
        self._sharing.unshare(slab)

    def dropped(self, entry: Entry, reason: str) -> None:
        evicted = reason in ("evicted", "retired")
        self._core.index.remove(entry)
        self._core.emit(e.BlockDropped(reason))
        if evicted:
            self._ghosts.add(entry.id)
        self._well.migration.left(entry, evicted=evicted)

    def troubled(self, error: StepwellError) -> None:
        self._core.emit(e.ArenaTroubled(str(error)))
