"""Engines come and go: their members join, a session opens when it is complete, and ends as a whole.

What a session held is given back when it ends, or kept apart until no process can touch it any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell import events as e
from stepwell.block.layout import SlabLayout
from stepwell.errors import ConfigError, StepwellError
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Core, Judge
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.requests.spills import Spills
from stepwell.hierarchy.sessions.registry import SessionRegistry
from stepwell.hierarchy.sessions.session import Channel, Member, Peer, Quarantine, Session, SessionPhase
from stepwell.hierarchy.sessions.sharing import SlabSharing
from stepwell.protocol import messages as m


@dataclass(eq=False)
class Members:
    """`well` and `tiers`: names that members are given."""

    _core: Core
    _arena: Arena
    _slabs: SlabPool
    _registry: SessionRegistry
    _sharing: SlabSharing
    _recalls: Recalls
    _spills: Spills
    _well: str
    _judge: Judge
    _tiers: list[str]

    def follow(self, judge: Judge) -> None:
        """Puts this check of joining engines' options in force."""
        self._judge = judge

    def join(self, peer: Peer, hello: m.Hello, channel: Channel) -> Member | None:
        """Takes a connection in and answers it. None: it was refused and is to be closed."""
        member: Member | None = None
        try:
            warnings = self._judge(hello.options) if hello.options else []
            member = self._registry.enter(peer, hello, channel)
            session = member.session
            if session.complete:
                self._fits(hello.shard_bytes)
                self._registry.open(session)
        except StepwellError as error:
            refused = m.Refused(error.code, error.what, error.why, error.fix)
            if member is None:
                channel.send(refused)
            else:
                for other in member.session.members:  # all are to know why, not only the last to join
                    other.channel.send(refused)
                self.end(member.session, without=member)
            return None
        for old in self._registry.disowned(member):
            self.end(old)
        for quarantine in self._registry.acknowledged(member):
            self._cleanse(quarantine)
        for number in self._registry.unmapped(member):
            self._slabs.let_go(number)
        if member.is_scheduler and self._core.pauses.spills:
            warnings.append("spills are paused by the well's operator: nothing is added to what is cached")
        host_bytes = self._core.limits.host_bytes
        flags = [m.LOOKS]
        channel.send(m.Welcome(session.number, m.PROTOCOL, self._well, host_bytes, warnings, self._tiers, flags))
        if session.phase is SessionPhase.LIVE:
            self._open(session)
        return member

    def _fits(self, shard_bytes: int) -> None:
        limits = self._core.limits
        if not SlabLayout.within(limits.host_bytes, shard_bytes, limits.slab_bytes).slots:
            raise ConfigError(
                "SW-107",
                what=f"a host tier of {limits.host_bytes} bytes cannot hold one shard of {shard_bytes} bytes",
                why="a slot holds a whole shard of a block",
                fix="raise `host` of the well, or lower `block_tokens` (below vLLM's offloading: `block_size`)",
            )

    def _open(self, session: Session) -> None:
        assert session.owner is not None
        for slab in self._slabs.serving(session.owner):
            self._sharing.share_with(session, slab)
        self._slabs.came(session.owner)
        assert session.scheduler is not None
        self._core.emit(e.SessionOpened(session.number, session.scheduler.label, len(session.workers)))
        for member in session.members:
            member.channel.send(m.Ready(session.number))

    def left(self, member: Member) -> None:
        """The member's connection has ended: so has its session, for all its members."""
        self.end(member.session, without=member)

    def exited(self, member: Member) -> None:
        """The member's process has exited: it copies no more."""
        freed = self._registry.exited(member)
        self.end(member.session, without=member)
        for quarantine in freed:
            self._cleanse(quarantine)
        self._slabs.let_go(member.number)

    def end(self, session: Session, without: Member | None = None) -> None:
        """Ends a session, unless it has ended. `without`: the member whose connection has ended or is ended by the
        caller."""
        if session.phase is SessionPhase.ENDED:
            return
        quarantine = self._registry.leave(session)
        for number in list(session.requests):
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
                    self._arena.release(entry)
        session.transfers.clear()
        if session.owner is not None and all(s.owner != session.owner for s in self._registry.sessions.values()):
            self._slabs.gone(session.owner)
        self._core.news.freed = True
        if quarantine is not None and not (quarantine.slots or quarantine.entries):
            self._registry.quarantines.remove(quarantine)
        self._core.emit(e.SessionEnded(session.number, len(quarantine.slots) if quarantine is not None else 0))
        for member in session.members:
            for slab in self._slabs.serving(session.owner) if session.owner else ():
                slab.mapped.discard(member.number)
            if member.number in self._registry.keeping and not self._slabs.keeps(member.number):
                del self._registry.keeping[member.number]
            if member is not without:
                member.channel.sever()

    def _cleanse(self, quarantine: Quarantine) -> None:
        self._arena.cleanse(quarantine.slots)
        for entry in quarantine.entries:
            self._arena.release(entry)
        self._core.news.changed = True

    def watches(self, member: Member) -> bool:
        """True while the exit of this member's process still matters."""
        numbers = {n for quarantine in self._registry.quarantines for n in quarantine.alive.values()}
        kept = member.number in self._registry.keeping and self._slabs.keeps(member.number)
        return member.session.phase is not SessionPhase.ENDED or member.number in numbers or kept

    def end_overdue(self) -> None:
        """Ends sessions that did not become complete in time."""
        if (due := self._registry.next_moment) is not None and due <= self._core.clock.now():
            for session in self._registry.overdue():
                self.end(session)
