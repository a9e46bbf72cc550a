"""Messages of members, checked against role and session state, and handed to the part that they are for."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell import events as e
from stepwell.block.state import BlockState
from stepwell.errors import ProtocolError
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Slab
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.looks import Looks
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.members import Members
from stepwell.hierarchy.operator import Operator
from stepwell.hierarchy.requests.planner import RecallPlanner
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.requests.spills import Spills
from stepwell.hierarchy.sessions.canaries import MAX_ERRORS, CanaryJudge
from stepwell.hierarchy.sessions.costs import Costs
from stepwell.hierarchy.sessions.session import Member, Session, SessionPhase
from stepwell.hierarchy.sessions.shares import OVERHEAD, Held
from stepwell.hierarchy.work import Work, WorkStep
from stepwell.policies.decide import RecallMode
from stepwell.protocol import messages as m

MAX_RESERVE = 256
"""Blocks in one Reserve."""

MAX_REQUESTS = 4096
"""Requests of one session that may be waiting, and as many that may be copying."""


@dataclass(eq=False)
class Dispatch:
    """`held` bounds the bytes of messages that wait to be answered."""

    _core: Core
    _arena: Arena
    _slabs: SlabPool
    _stack: Stack
    _migration: Migration
    _costs: Costs
    _members: Members
    _operator: Operator
    _recalls: Recalls
    _spills: Spills
    _looks: Looks
    _planner: RecallPlanner
    _canaries: CanaryJudge
    _held: Held

    def handle(self, member: Member, message: m.FromEngine) -> None:
        """One message of a member. A message that its role or state does not allow ends the session."""
        session = member.session
        if session.phase is SessionPhase.ENDED:
            return
        try:
            if m.overlong(message):
                raise _too_much(message)
            if member.is_scheduler:
                self._from_scheduler(session, message)
            else:
                self._from_worker(session, member, message)
        except ProtocolError as error:
            self._core.emit(e.MessageRefused(session.number, error.code, error.what))
            member.channel.send(m.Refused(error.code, error.what, error.why, error.fix))
            self._members.end(session, without=member)
            member.channel.sever()

    def _from_scheduler(self, session: Session, message: m.FromEngine) -> None:
        if session.phase is not SessionPhase.LIVE and not isinstance(message, m.Report):
            raise _not_now(message)
        match message:
            case m.Ask(ticket=number, digests=digests):
                waiting = len(session.requests) - len(
                    session.transfers
                )  # some of these are streams, which wait no more
                if len(digests) % 32 or number in session.requests or waiting >= MAX_REQUESTS:
                    raise _not_now(message)
                if not self._held.take(session, len(digests)):
                    self._recalls.decline(session, message)
                    return
                self._core.work.add(self._recalls.ask(session, message))
                if self._planner.mode(message.recall) is not RecallMode.NEVER:
                    self._migration.asked(session, message.epoch, digests)
            case m.Look(digests=digests):
                if len(digests) % 32:
                    raise _not_now(message)
                if not self._held.take(session, len(digests)):
                    self._looks.answer(session, message)
                    return
                self._core.work.add(self._holding(session, len(digests), self._looks.look(session, message)))
            case m.Recall(transfer=number, first=first, count=blocks):
                if number in session.transfers or len(session.transfers) >= MAX_REQUESTS or first < 0 or blocks < 0:
                    raise _not_now(message)
                self._recalls.recall(session, message)
            case m.Release(ticket=number, waited_s=waited_s, waits=waits, no_place=no_place):
                if waits:
                    self._recalls.give_way(session, number)
                else:
                    self._recalls.release(session, number, waited_s, no_place)
            case m.Reserve(digests=digests):
                if len(digests) % 32 or len(digests) > 32 * MAX_RESERVE:
                    raise _not_now(message)
                if not self._held.take(session, len(digests)):
                    self._spills.refuse(session, message, "queue_full")
                    return
                self._core.work.add(self._holding(session, len(digests), self._spills.reserve(session, message)))
            case m.Abandon(leases=leases):
                ended = [self._spills.abandon(session, lease, quarantine=False) for lease in leases]
                self._core.news.changed |= any(ended)
            case m.Forget(digests=digests):
                nbytes = len(digests) + OVERHEAD
                if session.forgetting + nbytes > 32 * m.MAX_DIGESTS + OVERHEAD:
                    raise _too_much(message)
                session.forgetting += nbytes
                self._core.work.add(self._forget(session, message))
            case m.Canary(epoch=epoch, kind=kind, errors=errors):
                if not 0 < len(errors) <= MAX_ERRORS:
                    raise _not_now(message)
                self._heard(session, epoch, kind, errors)
            case m.Report(counts=counts):
                self._core.emit(e.EngineReported(counts))
            case m.Timings(steps=steps, copies=copies):
                self._costs.heard(session.tag, steps, copies)
            case _:
                raise _not_now(message)

    def _from_worker(self, session: Session, member: Member, message: m.FromEngine) -> None:
        match message:
            case m.Mapped(slab=number):
                slab = self._slab_of(session, number)
                if slab is not None and member.number not in slab.mapped:
                    slab.mapped.add(member.number)
                    self._core.work.room_changed()
                    self._core.news.changed = True
            case m.Unmapped(slab=number):
                slab = self._slab_of(session, number)
                if slab is not None:
                    if slab.retirement is None:
                        raise _not_now(message)
                    self._slabs.unmapped(member.number, slab)
            case m.Filled(leases=leases, dropped=dropped):
                if self._spills.filled(session, member.hello.rank, leases, dropped):
                    self._core.news.changed = True
            case m.BlocksCopied(transfer=number, blocks=blocks):
                self._recalls.piece_copied(session, member.hello.rank, number, blocks)
            case m.Recalled(transfers=transfers):
                self._recalls.copied(session, member.hello.rank, transfers)
            case _:
                raise _not_now(message)

    def _slab_of(self, session: Session, number: int) -> Slab | None:
        slab = self._slabs.slabs.get(number)
        return slab if slab is not None and slab.owner == session.owner else None

    def _holding(self, session: Session, nbytes: int, work: Work) -> Work:
        yield from work
        self._held.give(session, nbytes)

    def _forget(self, session: Session, message: m.Forget) -> Work:
        for at in range(0, len(message.digests) - 31, 32):
            if session.phase is not SessionPhase.LIVE:
                return
            for origin in session.origins(message.epoch):
                id = origin.name(message.digests[at : at + 32])
                self._stack.drop(id)
                entry = self._core.index.find(id)
                if entry is not None and entry.state is BlockState.RESIDENT:
                    self._arena.drop(entry, "failed_check")
            yield WorkStep.DONE
        session.forgetting -= len(message.digests) + OVERHEAD

    def _heard(self, session: Session, epoch: int, kind: str, errors: list[float]) -> None:
        origins = session.origins(epoch)
        if self._canaries.heard(session.tenant, origins, kind, errors):
            for origin in origins:
                self._operator.drop(self._operator.tiers, origin.tag, lambda sums: None)


def _too_much(message: m.FromEngine) -> ProtocolError:
    return ProtocolError(
        "SW-802",
        what=f"a {type(message).__name__} that is too long",
        why="no engine has so much to say at a time",
        fix="use the same stepwell version for engine and well",
    )


def _not_now(message: m.FromEngine) -> ProtocolError:
    return ProtocolError(
        "SW-804",
        what=f"a {type(message).__name__} that is not allowed here or now",
        why="its sender's role or the session's state does not have it",
        fix="use the same stepwell version for engine and well",
    )
