"""Where a request's run lies: looked at without touching it, so that it can be weighed before anything is read."""

from __future__ import annotations

from stepwell.block.state import BlockState
from stepwell.block.tier import HOST
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.core import Index
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.reads import UNAWAITED
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.requests.weighing import Weighing
from stepwell.hierarchy.sessions.decision import EngineLoad
from stepwell.hierarchy.sessions.session import Session, SessionPhase, Ticket
from stepwell.hierarchy.work import Work, WorkStep
from stepwell.policies.decide import Stretch
from stepwell.policies.probe import PROBE_BYTES


class Survey:
    def __init__(self, index: Index, stack: Stack, weighing: Weighing) -> None:
        self._index = index
        self._stack = stack
        self._weighing = weighing

    def run(self, session: Session, ticket: Ticket, origins: tuple[Origin, ...]) -> Work:
        """Looks where the blocks of the run are, those that are pinned and those behind them, and decides how much of
        it the ticket may have."""
        assert session.owner is not None
        nbytes = session.owner.slot_bytes * session.shards
        ticket.extended = False
        lies = [(HOST, ticket.landed)]
        for at in range(ticket.landed, ticket.blocks):
            tier = self.tier_of(ticket, at, origins)
            if tier is None:
                break
            if lies[-1][0] == tier:
                lies[-1] = tier, lies[-1][1] + 1
            else:
                lies.append((tier, 1))
            yield WorkStep.DONE
        if session.phase is SessionPhase.LIVE and session.tickets.get(ticket.number) is ticket and not ticket.ends:
            self._weigh(session, ticket, tuple(Stretch(tier, n, n * nbytes) for tier, n in lies if n))

    def probe(self, session: Session, ticket: Ticket, origins: tuple[Origin, ...]) -> None:
        """A tier has just been refused: now and then a little is read all the same, so that it is known when it has
        become faster. No request waits for it."""
        left, parent = PROBE_BYTES, ticket.pinned[-1] if ticket.pinned and ticket.most <= len(ticket.pinned) else None
        probed: Level | None = None
        for at in range(max(ticket.most, len(ticket.pinned)), ticket.blocks):
            named = {origin.name(ticket.digests[32 * at : 32 * at + 32]): origin for origin in origins}
            source = self._stack.find(*named) if self._index.find(*named) is None else None
            if left <= 0 or source is None or source.level is not (probed or source.level):
                return
            level = probed = source.level
            if at == max(ticket.most, len(ticket.pinned)) and (
                level.reads.promoting or level.down or not level.reads.speed.probe()
            ):
                return
            entry = level.promote(session, named[source.id], source.id, parent, UNAWAITED)
            if entry is None:
                return
            left, parent = left - entry.nbytes, entry

    def again(self, session: Session, ticket: Ticket, *, final: bool) -> int:
        """How many blocks of the ticket's run are worth having as things are now; those behind them are not, because of
        `ticket.short`. All, unless something is known by now that was not. `final`: it grows no more."""
        whole = len(ticket.pinned)
        if ticket.weighed is None:
            if not whole or ticket.landed < whole or not final or ticket.ends or ticket.short:
                return whole
            self._weigh(session, ticket, (Stretch(HOST, whole, sum(entry.nbytes for entry in ticket.pinned)),))
            return min(whole, ticket.most)
        if ticket.landed < whole and self._weighing.late(ticket.weighed, ticket.order, ticket.landed):
            ticket.short = "late"
            return ticket.landed
        return whole

    def tier_of(self, ticket: Ticket, at: int, origins: tuple[Origin, ...]) -> str | None:
        """Where this block would come from; None: it is nowhere, or somebody is filling it."""
        digest = ticket.digests[32 * at : 32 * at + 32]
        ids = [origin.name(digest) for origin in origins]
        entry = self._index.find(*ids)
        if entry is None:
            source = self._stack.find(*ids)
            return source.level.name if source is not None else None
        if (level := self._stack.promoting(entry)) is not None:
            return level.name
        return HOST if entry.state is BlockState.RESIDENT else None

    def _weigh(self, session: Session, ticket: Ticket, stretches: tuple[Stretch, ...]) -> None:
        assert session.scheduler is not None
        if session.load is None:
            session.load = EngineLoad(session.tag)
        block_tokens = session.scheduler.hello.block_tokens
        mode = self._weighing.mode(ticket.recall)
        if ticket.weighed is not None:  # of a shorter run
            self._weighing.ended(ticket.weighed, 0, 0.0)
        weighed = self._weighing.weigh(session.load, ticket.order, mode, ticket.tokens, block_tokens, stretches)
        ticket.weighed = weighed
        if weighed.decision.blocks < weighed.request.blocks:
            ticket.most, ticket.short = weighed.decision.blocks, weighed.decision.why.value
