"""Uses of blocks that are not in host memory: a request needed them, and they were computed or promoted."""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.block.namespace import BlockId
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.sessions.costs import Costs
from stepwell.hierarchy.sessions.session import Session


class AbsentUses:
    """Reports each to the arena's policy, with what computing the block takes."""

    def __init__(self, arena: Arena, costs: Costs) -> None:
        self._arena = arena
        self._costs = costs

    def note(self, session: Session, blocks: Mapping[BlockId, int], *, first: bool) -> None:
        """A request of the session needs these blocks, each so many blocks into its prompt; `first` of those that it
        needs."""
        assert session.owner is not None
        assert session.scheduler is not None
        if blocks:
            weights = self._costs.weights(session.tag, session.scheduler.hello.block_tokens, blocks.values())
            self._arena.asked(session.owner, zip(blocks, blocks.values(), weights, strict=True), first=first)
