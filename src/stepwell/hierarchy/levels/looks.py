"""Saying which blocks are there, without holding or moving any: for engines that need some blocks of a prompt and not
all before them."""

from __future__ import annotations

from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.session import NAMED, Session, SessionPhase
from stepwell.hierarchy.work import Work
from stepwell.protocol.messages import Look, Seen


class Looks:
    def __init__(self, core: Core, stack: Stack, canaries: CanaryJudge) -> None:
        self._index = core.index
        self._pauses = core.pauses
        self._stack = stack
        self._canaries = canaries

    def look(self, session: Session, message: Look) -> Work:
        origins = session.origins(message.epoch)
        here = bytearray()
        for at in range(0, len(message.digests), 32 * NAMED):
            if session.phase is not SessionPhase.LIVE:
                return
            names = [origin.names(message.digests[at : at + 32 * NAMED]) for origin in origins]
            here += bytes(map(self._has, *names))
            yield len(names[0])
        barred = self._pauses.recalls or self._canaries.bars(origins)
        self.answer(session, message, b"" if barred else bytes(here))

    def answer(self, session: Session, message: Look, here: bytes = b"") -> None:
        """Says 0 of all blocks behind `here`."""
        if session.phase is SessionPhase.LIVE and session.scheduler is not None:
            here = here.ljust(len(message.digests) // 32, b"\0")
            session.scheduler.channel.send(Seen(message.ticket, here))

    def _has(self, *ids: BlockId) -> bool:
        """True if a request that has come to this block, by any of these ids, would find it."""
        entry = self._index.find(*ids)
        level = self._stack.promoting(entry) if entry is not None else None
        if entry is not None and (level is None or not level.down):
            return level is not None or entry.state is BlockState.RESIDENT
        source = self._stack.find(*ids)
        return source is not None and not source.level.down
