"""Tells members which slabs to map, those that serve their session's owner, and which to unmap, those retired."""

from __future__ import annotations

from stepwell import events as e
from stepwell.hierarchy.arena.records import Slab
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.sessions.registry import SessionRegistry
from stepwell.hierarchy.sessions.session import Session, SessionPhase
from stepwell.protocol import messages as m


class SlabSharing:
    def __init__(self, core: Core, registry: SessionRegistry) -> None:
        self._emit = core.emit
        self._registry = registry

    def share(self, slab: Slab) -> None:
        self._emit(e.SlabServing(slab.layout.nbytes))
        for session in self._registry.sessions.values():
            if session.phase is SessionPhase.LIVE and session.owner == slab.owner:
                self.share_with(session, slab)

    @staticmethod
    def share_with(session: Session, slab: Slab) -> None:
        layout = slab.layout
        message = m.SlabShared(slab.number, layout.nbytes, layout.offset, layout.stride, layout.slots)
        for member in session.workers.values():
            if member.hello.pins:
                slab.keepers.add(member.number)
            member.channel.send(message, (slab.memory.fd,))

    def unshare(self, slab: Slab) -> None:
        self._emit(e.SlabRemoved(slab.layout.nbytes))
        for session in self._registry.sessions.values():
            if session.owner == slab.owner:
                for member in session.workers.values():
                    member.channel.send(m.SlabRetired(slab.number))
