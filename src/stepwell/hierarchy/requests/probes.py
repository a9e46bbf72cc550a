"""Asking tiers that others write to for what a request's run has there: once for each request, where what is known of
its run ends."""

from __future__ import annotations

from functools import partial

from stepwell.block.namespace import BlockId
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.core import News
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.sessions.session import RecallRequest, Session, SessionPhase
from stepwell.hierarchy.work import Work, WorkStep


class Probes:
    def __init__(self, news: News, stack: Stack) -> None:
        self._news = news
        self._stack = stack
        self._asked: dict[RecallRequest, list[Level]] = {}  # that have not answered, once for each call
        self._answered: dict[RecallRequest, Session] = {}

    def run(self, session: Session, request: RecallRequest, origins: tuple[Origin, ...]) -> Work:
        """Asks for all blocks that are not here, under each of the tenant's keys."""
        request.probed = True
        named: list[list[BlockId]] = [[] for _ in origins]
        for at in range(request.landed, request.blocks):
            for ids, origin in zip(named, origins, strict=True):
                ids.append(origin.name(request.digests[32 * at : 32 * at + 32]))
            yield WorkStep.DONE
        if session.phase is not SessionPhase.LIVE or session.requests.get(request.number) is not request:
            return
        for level in self._stack.levels:
            for ids in named:
                if level.probe(ids, partial(self._done, session, request, level)):
                    self._asked.setdefault(request, []).append(level)

    def awaits(self, request: RecallRequest) -> bool:
        """True if some tier has not answered and still may."""
        return any(not level.down for level in self._asked.get(request, ()))

    def answered(self) -> dict[RecallRequest, Session]:
        """Takes the requests that a tier has answered since the last call."""
        answered, self._answered = self._answered, {}
        return answered

    def forget(self, request: RecallRequest) -> None:
        """Drops the probes of a request that has its final answer or has ended."""
        self._asked.pop(request, None)
        self._answered.pop(request, None)

    def _done(self, session: Session, request: RecallRequest, level: Level) -> None:
        left = self._asked.get(request)
        if left is None:
            return  # it is too late
        left.remove(level)
        if not left:
            del self._asked[request]
        request.extended = request.weighed is not None
        self._answered[request] = session
        self._news.probed = True
