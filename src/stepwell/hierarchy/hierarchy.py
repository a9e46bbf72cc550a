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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stepwell import events as e
from stepwell.block.namespace import BlockId
from stepwell.block.tier import HOST, Figures, WellStats
from stepwell.errors import StepwellError
from stepwell.events import Event, Sink
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry, Slab
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Callback, Core, Limits, Options, System
from stepwell.hierarchy.counters import Counters, Ghosts
from stepwell.hierarchy.dispatch import Dispatch
from stepwell.hierarchy.levels.looks import Looks
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.reads import MAX_BATCH
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.members import Members
from stepwell.hierarchy.operator import Operator
from stepwell.hierarchy.pauses import Pauses
from stepwell.hierarchy.requests.planner import RecallPlanner
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.requests.spills import Spills
from stepwell.hierarchy.requests.uses import AbsentUses
from stepwell.hierarchy.saved import KINDS, SavedState, StateStore
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.costs import Costs
from stepwell.hierarchy.sessions.decision import DecisionLog
from stepwell.hierarchy.sessions.registry import SessionRegistry
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Channel, Member, Peer, RecallRequest
from stepwell.hierarchy.sessions.shares import Held, Shares
from stepwell.hierarchy.sessions.sharing import SlabSharing
from stepwell.hierarchy.work import WorkQueue
from stepwell.policies.catalog import POLICIES, MakePolicy
from stepwell.protocol.messages import FromEngine, Hello
from stepwell.tiers.base import Tier


class Hierarchy:
    """`tiers`: where blocks go below the arena, the uppermost first, each with a name of its own; they answer on this
    thread. `well`: the name that members are given. `policy`: makes the policy of each owner's blocks in host memory.
    `tenants`: how many share this well. `saved` and `store`: what an earlier well has left, and what keeps this one's
    state for the next. `sink` takes every event."""

    def __init__(
        self,
        limits: Limits,
        system: System,
        sealing: Sealing,
        options: Options | None = None,
        *,
        well: str,
        tiers: Sequence[Tier] = (),
        policy: MakePolicy = POLICIES["auto"],
        tenants: int = 1,
        saved: SavedState | None = None,
        store: StateStore | None = None,
        sink: Sink = lambda event: None,
    ) -> None:
        options, saved, store = options or Options(), saved or SavedState(), store or StateStore()
        self._clock = clock = system.clock
        self._started = clock.now()
        self.well = well
        self.limits = limits
        self.counters = Counters()
        self.decisions = DecisionLog()
        self._sink = sink
        self.pauses = Pauses(self._emit, saved.paused, store)
        self.shares = Shares(tenants)
        self._core = core = Core(clock, limits, self._emit, self.pauses, WorkQueue(clock))
        ghosts = Ghosts()
        self.held = held = Held(self.shares)
        self.registry = registry = SessionRegistry(clock, self.shares, sealing, system.entropy)
        self.canaries = canaries = CanaryJudge(clock, self._emit, saved.barred, store)
        sharing = SlabSharing(core, registry)
        observer = _Observer(self, core, sharing, ghosts)
        self.arena = arena = Arena(limits.host_bytes, observer, clock, options.placement, policy)
        self.slabs = slabs = SlabPool(arena, system.memory, system.executor, observer, clock, limits.slab_bytes)
        self.costs = costs = Costs(clock, max(1, limits.readers) * MAX_BATCH, saved.calibrations, store)
        self.stack = stack = Stack(core, arena, tiers, sealing)
        self.migration = moves = Migration(
            core, arena, slabs, stack, canaries, options.write, prefetch=options.prefetch
        )
        self._planner = planner = RecallPlanner(core, costs, stack, options.recall)
        uses = AbsentUses(arena, costs)
        self._recalls = recalls = Recalls(
            core, arena, slabs, stack, moves, planner, uses, canaries, ghosts, held, options.pin_waiting
        )
        self._spills = spills = Spills(core, arena, slabs, stack, moves, uses, canaries)
        self.operator = operator = Operator(core, arena, stack, moves, recalls, registry, canaries)
        self._members = members = Members(
            core, arena, slabs, registry, sharing, recalls, spills, well, options.judge, self.tiers
        )
        looks = Looks(core, stack, canaries)
        self._dispatch = Dispatch(
            core, arena, slabs, stack, moves, costs, members, operator, recalls, spills, looks, planner, canaries, held
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
        """True while the exit of this member's process still matters."""
        return self._members.watches(member)

    # work -------------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One slice of pending work; True if more is waiting."""
        if self._core.news.any:
            self._core.work.room_changed()
            self._recalls.look()
        self.stack.pump_due()
        if (due := self.slabs.next_moment) is not None and due <= self._clock.now():
            self.slabs.serve_queue()
        self._members.end_overdue()
        self.migration.turn()
        self.arena.tidy()
        self._core.work.turn()
        return self._core.work.more or self._core.news.any or self.arena.past_owners.too_many

    # a well's beginning and end ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finds what an earlier life left in the tier, in the background. Call once, at first."""
        self.stack.recover()

    def drain(self, done: Callback) -> None:
        """Writes what is still to be written, when no member is connected any more; `done` is called when each tier has
        it in its best form. Call `turn` and deliver completions meanwhile."""
        self.migration.drain(done)

    def follow(self, options: Options) -> None:
        """Puts these options in force."""
        self._members.follow(options.judge)
        self._planner.follow(options.recall)
        self._recalls.pins.follow(options.pin_waiting)
        self.arena.follow(options.placement)
        self.migration.follow(options.write, prefetch=options.prefetch)

    # looking ----------------------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> list[str]:
        """Names of the host tier and of those below it."""
        return [HOST, *(level.name for level in self.stack.levels)]

    @property
    def holds_blocks(self) -> bool:
        """True if host memory holds blocks, which would be lost with it."""
        return self.arena.sums.blocks > 0

    @property
    def idle(self) -> bool:
        """True if no message of an engine waits to be answered."""
        return self._core.work.idle

    @property
    def next_moment(self) -> float | None:
        """When time alone gives `turn` something to do; None: never."""
        parts = (self._core.work, self.stack, self.migration, self.slabs, self.registry)
        return min((moment for part in parts if (moment := part.next_moment) is not None), default=None)

    @property
    def leaving(self) -> Collection[RecallRequest]:
        """Requests that have ended and still hold pins."""
        return self._recalls.pins.leaving

    @property
    def sessions(self) -> int:
        return len(self.registry.sessions)

    def stats(self) -> Figures:
        """`figures` as one flat table."""
        return self.figures().flat()

    def figures(self) -> WellStats:
        """What is held now, and what was counted since the start."""
        well: Figures = {
            "well": self.well,
            "uptime_s": round(self._clock.now() - self._started, 3),
            "sessions": self.sessions,
            "engines": ", ".join(sorted(self._labels())),
            "quarantined_sessions": len(self.registry.quarantines),
            "quarantined_namespaces": len(self.canaries.barred),
            **self._paused(),
            "tiers": ",".join(self.tiers),
            "host_bytes": self.limits.host_bytes,
            **self.slabs.count(),
            **self.arena.count(),
            **self.counters.values(),
            "trouble": str(self.slabs.trouble or ""),
            "paused": "; ".join(map(str, self.pauses.all)),
        }
        return WellStats(well, {tier: {**self.counters.of(tier), **of} for tier, of in self.stack.count().items()})

    def stats_of(self, tenant: str) -> Figures:
        """Figures that one tenant may know: none of them depends on what the others hold or do."""
        sessions = sum(session.tenant == tenant for session in self.registry.sessions.values())
        return {
            "well": self.well,
            "uptime_s": round(self._clock.now() - self._started, 3),
            "tenant": tenant,
            "sessions": sessions,
            **self._paused(),
            "host_bytes": self.limits.host_bytes,
        }

    def _labels(self) -> set[str]:
        """What engines are called for people, each name once."""
        return {session.scheduler.label for session in self.registry.sessions.values() if session.scheduler is not None}

    def _paused(self) -> dict[str, int]:
        paused = [pause.kind for pause in self.pauses.all]
        return {f"paused_{kind}": int(kind in paused) for kind in KINDS}

    def close(self) -> None:
        """Ends all sessions and frees all shared memory. No job may be running any more."""
        for session in list(self.registry.sessions.values()):
            self._members.end(session, without=session.members[0])
            session.members[0].channel.sever()
        self.slabs.close()
        self.stack.close()


@dataclass(eq=False)
class _Observer:
    """Passes the arena's changes on to the parts that they concern. Some are made after the arena, so they are taken
    from the well."""

    _well: Hierarchy
    _core: Core
    _sharing: SlabSharing
    _ghosts: Ghosts

    def serving(self, slab: Slab | None) -> None:
        self._core.work.room_changed()
        if slab is None:
            self._core.news.changed = True  # no request needs to wait for it
        else:
            self._sharing.share(slab)

    def retired(self, slab: Slab) -> None:
        self._core.news.changed = True  # no request needs to wait until it is mapped
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
