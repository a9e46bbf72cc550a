"""What clients and workers are told of a run: what has landed of it, how far it reaches, and that its line moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.requests.probes import Probes
from stepwell.hierarchy.requests.transfers import Transfers
from stepwell.hierarchy.requests.waiting import Waiting
from stepwell.hierarchy.sessions.session import RecallRequest, Session
from stepwell.protocol.messages import Found, LineMoved

SLICE = 128
"""Blocks told in one message: bounds how long building it takes."""

LINE = ("staging", "pins", "no_room")
"""Reasons to wait that other requests have a part in."""

MOVES_S = 0.02
"""Least time between two messages that the line moves, in seconds: less than half of what a client waits for one."""


class RunAnswers:
    """`waiting`: the requests that wait."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        stack: Stack,
        migration: Migration,
        probes: Probes,
        transfers: Transfers,
        waiting: Waiting,
    ) -> None:
        self._clock = core.clock
        self._arena = arena
        self._stack = stack
        self._migration = migration
        self._probes = probes
        self._transfers = transfers
        self._waiting = waiting
        self._moved_at = 0.0  # when sessions were last told that the line moves
        self._whole = False  # one in line has had all of its blocks since
        self._gave_at: dict[int, float] = {}  # when each level last gave blocks

    def due(self, request: RecallRequest) -> bool:
        """As much has landed as one message tells."""
        return request.landed - request.told >= SLICE and not self._is_silent(request)

    def _is_silent(self, request: RecallRequest) -> bool:
        """It was asked to give way: what its client is told before that has released the run would be of another."""
        return request.asked_way and not request.transfer

    def tell(self, session: Session, request: RecallRequest, *, more: bool, reason: str = "") -> None:
        """Tells the client, or the workers that copy its stream, what has landed of the request's run since the last
        time. With `more` the run may grow; else the answer is final, because of `reason`."""
        if self._is_silent(request):
            return
        first, end = request.told, request.landed
        if more and not reason:
            end = min(end, first + SLICE)
        news, promoted = request.pinned[first:end], request.promoted[first:end]
        known = max(0, request.used - first)  # before it became a stream
        used = news[known:]
        again = [entry for entry, below in zip(used, promoted[known:], strict=True) if not below]
        self._arena.touch(again)  # the use of others was counted when they were asked for
        self._migration.used(used, again)
        request.used = max(request.used, end)
        request.allow_s = self.allowance_s(request)
        if request.transfer:
            self._transfers.land(session, request, end, more=more, reason=reason, allow_s=request.allow_s)
        elif session.scheduler is not None:
            sources = bytes(entry.source + 1 if below else 0 for entry, below in zip(news, promoted, strict=True))
            session.scheduler.channel.send(self._found(request, news, sources, more=more, reason=reason))
            request.told = end

    def _found(
        self,
        request: RecallRequest,
        news: Sequence[Entry],
        sources: bytes,
        *,
        more: bool,
        reason: str,
    ) -> Found:
        """`news`: blocks of its run that its client has not been told."""
        known, ends = request.known, request.ends_known
        if request.ends:
            known, ends = len(request.pinned), request.ends
        elif not more:
            known, ends = max(known, len(request.pinned)), ends or reason
        elif request.extended or self._probes.awaits(request):
            known, ends = 0, ""
        return Found(
            request.number,
            request.told,
            b"".join(e.refs for e in news),
            more,
            reason,
            sources,
            request.allow_s,
            request.weighed.decision.limit_s if request.weighed is not None else 0.0,
            known,
            ends,
            request.lies,
        )

    def allowance_s(self, request: RecallRequest) -> float:
        """Seconds that the request may wait for its next block in addition to the usual patience."""
        stake_s = request.weighed.stake_s if request.weighed is not None else 0.0
        return (self.awaited(request) or self._stack).allowance_s(stake_s)

    def awaited(self, request: RecallRequest) -> Level | None:
        """The level that the next block of its run is promoted from; None: there is none, or the block is from none."""
        return self._stack.promoting(request.awaited) if request.awaited is not None else None

    def line_moves(self, sources: Iterable[int] = (), *, whole: bool = False) -> None:
        """Requests have got blocks from these levels, or room: those that wait are not stalled. `whole`: one of them
        has had all of its blocks."""
        now = self._clock.now()
        self._gave_at |= dict.fromkeys(sources, now)
        self._whole |= whole
        if now - self._moved_at < MOVES_S:
            return
        apart: dict[Session, list[int]] = {}
        sharing = 0
        for request, session in self._waiting.all():
            named = apart.setdefault(session, [])
            sharing += request.waiting in LINE
            level = self.awaited(request)
            if level is not None and not (
                now - self._gave_at.get(level.number, -inf) < MOVES_S
                and level.reads.waits(request.pinned[request.landed])
            ):
                named.append(request.transfer or request.number)
        for session, named in apart.items():
            for member in session.members:
                member.channel.send(LineMoved(named, sharing, self._whole))
        self._moved_at, self._whole = now, False
