"""Connected engines: members become sessions, sessions end, and what they left is kept apart until it is safe.

Nothing here touches blocks: callers learn what to open and what to clear up.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import count

from msgspec.structs import replace

from stepwell.block.facts import MAX_FACTS
from stepwell.block.namespace import Namespace, layout_of_session
from stepwell.errors import CapacityError, IdentityMismatch, ProtocolError, StepwellError
from stepwell.hierarchy.arena.records import Owner
from stepwell.hierarchy.core import Entropy
from stepwell.hierarchy.sessions.keyed import KeyedNamespace
from stepwell.hierarchy.sessions.known import KnownFacts
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Channel, Member, Peer, Quarantine, Session, SessionPhase
from stepwell.hierarchy.sessions.shares import Shares
from stepwell.io.clock import Clock
from stepwell.protocol.messages import MAX_FLAGS, MAX_GROUPS, OLDEST_PROTOCOL, PROTOCOL, CacheGroup, Hello, overlong

MAX_SESSIONS = 256

ASSEMBLE_S = 600.0
"""For all members of a session to come. An engine's workers may be there minutes before its scheduler: meanwhile
weights are hashed, and kernels compiled. Who is still alone then joins again, if it lives."""


class SessionRegistry:
    """`entropy(n)`: n random bytes."""

    def __init__(self, clock: Clock, shares: Shares, sealing: Sealing, entropy: Entropy = secrets.token_bytes) -> None:
        self._clock = clock
        self._shares = shares
        self._sealing = sealing
        self._incomplete: dict[int, float] = {}  # until when sessions have time to become complete, the oldest first
        # From a random start: an engine must not take the session of a new well for that of the one before.
        self._numbers = count(int.from_bytes(entropy(6), "big") + 1)
        self.sessions: dict[int, Session] = {}
        self.quarantines: list[Quarantine] = []
        self.known = KnownFacts()
        self.keeping: dict[int, Member] = {}  # workers of ended sessions that pin, and may do so still

    def enter(self, peer: Peer, hello: Hello, channel: Channel) -> Member:
        """The member, in a session that may now be complete. Raises StepwellError with what the engine is told."""
        _examine(peer, hello)
        engine = (peer.uid, peer.tenant, hello.engine)
        session = next(
            (s for s in self.sessions.values() if s.engine == engine and s.phase is SessionPhase.ASSEMBLING), None
        )
        if session is None:
            taken = Counter(s.tenant for s in self.sessions.values())
            if not self._shares.has_room(MAX_SESSIONS, taken, peer.tenant):
                raise CapacityError(
                    "SW-204",
                    what="no more sessions",
                    why=f"a well has {MAX_SESSIONS} places for engines, some of them set aside for each tenant",
                    fix="give some engines a well of their own with STEPWELL_HOME",
                )
            session = Session(next(self._numbers), engine, peer.tenant)
            self.sessions[session.number] = session
            self._incomplete[session.number] = self._clock.now() + ASSEMBLE_S
        if hello.role == "worker" and hello.rank:
            hello = replace(hello, facts=b"")  # those of the first rank are kept
        member = Member(next(self._numbers), peer, hello, channel, session)
        if member.is_scheduler:
            if session.scheduler is not None:
                raise _stranger(hello)
            session.scheduler = member
        else:
            if hello.rank in session.workers:
                raise _stranger(hello)
            session.workers[hello.rank] = member
        return member

    @property
    def next_moment(self) -> float | None:
        """When a session's time to become complete is over."""
        return next(iter(self._incomplete.values()), None)

    def overdue(self) -> list[Session]:
        """Sessions that did not become complete in time."""
        now = self._clock.now()
        return [self.sessions[number] for number, until in self._incomplete.items() if until <= now]

    def open(self, session: Session) -> None:
        """Makes a complete session live. Raises IdentityMismatch when its members describe different things."""
        scheduler = session.scheduler
        assert scheduler is not None
        workers = [session.workers[r].hello for r in sorted(session.workers)]
        first = scheduler.hello
        shapes = {(each.world, each.shard_bytes, each.replicas) for each in (first, *workers)}
        alike = all(w.layout == workers[n - n % first.replicas].layout for n, w in enumerate(workers))
        if len(shapes) != 1 or not alike or [w.rank for w in workers] != list(range(first.world)):
            raise IdentityMismatch(
                "SW-401",
                what="the engine's processes do not describe one shape",
                why=f"(ranks, shard bytes, ranks that hold the same) are {sorted(shapes)}"
                + ("" if alike else ", and ranks that should hold the same have other layouts"),
                fix="ranks with shards of different sizes are not supported; run without stepwell",
            )
        layout = layout_of_session(first.layout, [w.layout for w in workers], first.shard_bytes, first.replicas)
        codec = self._sealing.codec_name(first.groups)
        namespace = Namespace(first.weights, first.model, layout, first.block_tokens, codec=codec)
        session.keyed = KeyedNamespace(self._sealing, session.tenant, namespace)
        session.owner = Owner(session.tenant, namespace.encode(), first.shard_bytes)
        session.copiers = frozenset(m.number for m in session.workers.values())
        session.shards = first.world // first.replicas
        session.writers = frozenset(range(0, first.world, first.replicas))
        session.phase = SessionPhase.LIVE
        self.known.note(session)
        for member in session.members:
            member.hello = replace(member.hello, facts=b"")
        del self._incomplete[session.number]

    def leave(self, session: Session) -> Quarantine | None:
        """Ends the session; a quarantine for what its copying processes may still touch, if any of them lives."""
        was_live, session.phase = session.phase is SessionPhase.LIVE, SessionPhase.ENDED
        del self.sessions[session.number]
        self._incomplete.pop(session.number, None)
        self.keeping.update((m.number, m) for m in session.workers.values() if m.hello.pins and not m.exited)
        if not was_live:
            return None  # it was never leased anything
        alive = {rank: m.number for rank, m in session.workers.items() if not m.exited}
        if not alive:
            return None
        quarantine = Quarantine(session.number, session.engine, alive)
        self.quarantines.append(quarantine)
        return quarantine

    def exited(self, member: Member) -> list[Quarantine]:
        """Notes that the member's process has exited; returns quarantines that no process can touch any longer."""
        member.exited = True
        self.keeping.pop(member.number, None)
        return self._spare(member.number)

    def disowned(self, member: Member) -> list[Session]:
        """Sessions that the member says have ended, before we saw the end of their connections."""
        if member.is_scheduler:
            return []
        olds = (self.sessions.get(number) for number in set(member.hello.acknowledges))
        return [s for s in olds if s is not None and s.engine == member.engine and s is not member.session]

    def acknowledged(self, member: Member) -> list[Quarantine]:
        """The member says that its copies in these earlier sessions have ended."""
        if member.is_scheduler:
            return []
        said = set(member.hello.acknowledges)
        olds = [
            q.alive[member.hello.rank]
            for q in self.quarantines
            if q.session in said and q.engine == member.engine and member.hello.rank in q.alive
        ]
        return [q for old in olds for q in self._spare(old)]

    def unmapped(self, member: Member) -> list[int]:
        """Numbers that the member had in earlier sessions of which, it says, nothing is left in its process."""
        if member.is_scheduler:
            return []
        said, rank = set(member.hello.acknowledges), member.hello.rank
        olds = [
            n
            for n, old in self.keeping.items()
            if old.session.number in said and old.engine == member.engine and old.hello.rank == rank
        ]
        for old in olds:
            del self.keeping[old]
        return olds

    def _spare(self, number: int) -> list[Quarantine]:
        for quarantine in self.quarantines:
            quarantine.alive = {rank: n for rank, n in quarantine.alive.items() if n != number}
        freed = [q for q in self.quarantines if not q.alive]
        self.quarantines = [q for q in self.quarantines if q.alive]
        return freed


def _examine(peer: Peer, hello: Hello) -> None:
    """Raises ProtocolError or IdentityMismatch for a hello that cannot be served."""
    if not OLDEST_PROTOCOL <= hello.protocol <= PROTOCOL:
        raise ProtocolError(
            "SW-801",
            what=f"the engine side speaks protocol {hello.protocol}",
            why=f"this well speaks {OLDEST_PROTOCOL} to {PROTOCOL}",
            fix="install the same stepwell version for both, then `stepwell stop`",
        )
    if overlong(hello):
        raise ProtocolError(
            "SW-804",
            what=f"a hello of {len(hello.facts)} bytes of facts, {len(hello.groups)} groups, {len(hello.flags)} flags",
            why=f"a well takes {MAX_FACTS} bytes, {MAX_GROUPS} groups and {MAX_FLAGS} flags",
            fix="use the same stepwell version for engine and well",
        )
    digests = (hello.layout, hello.weights, hello.model) if hello.role == "scheduler" else (hello.layout,)
    sane = (
        hello.role in ("scheduler", "worker")
        and 0 < hello.world <= 4096
        and 0 <= hello.rank < hello.world
        and 0 < hello.replicas <= hello.world
        and hello.world % hello.replicas == 0
        and 0 < hello.shard_bytes <= 1 << 30
        and 0 < len(hello.engine) <= 128
        and all(len(d) == 32 for d in digests)
        and _makes_up(hello.groups, hello.shard_bytes)
        and (hello.role == "worker" or 0 < hello.block_tokens <= 1 << 20)
    )
    if not sane:
        raise ProtocolError(
            "SW-804",
            what="a hello that makes no sense",
            why="its role, a size or the length of a digest is none that an engine can have",
            fix="use the same stepwell version for engine and well",
        )
    if hello.role == "worker" and not peer.watched:
        raise ProtocolError(
            "SW-805",
            what="a worker without a pidfd",
            why="the well could not tell when its copies end",
            fix="use Linux 5.3 or newer and allow pidfd_open in the seccomp profile",
        )


def _makes_up(groups: Sequence[CacheGroup], shard_bytes: int) -> bool:
    """Groups that were named make up the shard together, or some shards each."""
    numbers = [(g.layers, g.heads, g.head_size, g.block_tokens, g.shard_bytes, g.span) for g in groups]
    sane = all(0 <= number <= 1 << 30 for group in numbers for number in group)
    sane = sane and all(0 <= g.resume_bytes <= 1 << 40 for g in groups)
    whole = all(g.shard_bytes and g.shard_bytes % shard_bytes == 0 for g in groups)
    return sane and (whole or sum(g.shard_bytes for g in groups) == shard_bytes)


def _stranger(hello: Hello) -> StepwellError:
    return IdentityMismatch(
        "SW-404",
        what=f"{hello.role} {hello.rank} of this engine is connected already",
        why="an engine has one scheduler and one worker per rank",
        fix="nothing, if it is joining again; else give each engine its own engine_id",
    )
