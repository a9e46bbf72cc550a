"""Answering requests: follow a prefix through the index, pin what is resident, promote what lies below, lease what is
recalled.

A request's life:   Ask -> followed in slices -> Found ... Found(final) -> Recall (pins become leases) or Release
Before anything is read for it, the rest of its run is looked at and weighed: what is not worth it is left alone.
A run grows past blocks that are being promoted: they are pinned as they are asked for, and told when they have
landed. It may be recalled as a stream before that: then they go to the workers as they land, and it ends with the copy.
Where it cannot grow yet (a block that the session itself is filling, a slab not mapped everywhere, no room for
pins) the request waits and is followed again when something changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.block.state import BlockState
from stepwell.events import BlocksRecalled, RunAnswered
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.counters import Ghosts
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.pauses import PAUSED
from stepwell.hierarchy.requests.answers import LINE, RunAnswers
from stepwell.hierarchy.requests.growth import UNPROBED, UNWEIGHED, Obstacle, RunGrowth
from stepwell.hierarchy.requests.pins import Pins
from stepwell.hierarchy.requests.planner import RecallPlanner
from stepwell.hierarchy.requests.probes import Probes
from stepwell.hierarchy.requests.transfers import Transfers
from stepwell.hierarchy.requests.uses import AbsentUses
from stepwell.hierarchy.requests.waiting import Waiting
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.session import RecallRequest, RecallStream, Session, SessionPhase
from stepwell.hierarchy.sessions.shares import Held
from stepwell.hierarchy.work import Work, WorkStep
from stepwell.policies.decide import RecallMode, Why
from stepwell.protocol.messages import Ask, Found, GiveWay, Landed, NoPlace, Recall

HERE = ("end", "filling")
"""Why a run ends that no tier has more of."""


class Recalls:
    """`ghosts` are blocks that were evicted lately, `held` the bytes of questions that wait."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        slabs: SlabPool,
        stack: Stack,
        migration: Migration,
        planner: RecallPlanner,
        uses: AbsentUses,
        canaries: CanaryJudge,
        ghosts: Ghosts,
        held: Held,
        pin_waiting: float,
    ) -> None:
        self._clock = core.clock
        self._index = core.index
        self._news = core.news
        self._emit = core.emit
        self._work = core.work
        self._pauses = core.pauses
        self._stack = stack
        self._migration = migration
        self._planner = planner
        self._probes = Probes(core.news, stack)
        self._canaries = canaries
        self._held = held
        self.pins = Pins(core, arena, stack, pin_waiting)
        self.waiting = Waiting()
        self.transfers = Transfers(core, arena, self.pins)
        self._growth = RunGrowth(core, arena, slabs, stack, self.pins, self._probes, uses, ghosts)
        self._answers = RunAnswers(core, arena, stack, migration, self._probes, self.transfers, self.waiting)

    def ask(self, session: Session, message: Ask) -> Work:
        turn = self._stack.turns.join(message.order)
        request = RecallRequest(message.ticket, message.order, turn, message.epoch, message.digests)
        request.tokens, request.recall, request.prefix = message.tokens, message.recall, message.prefix
        if self._planner.mode(request.recall) is RecallMode.NEVER:
            request.most, request.short = 0, Why.NEVER.value
        session.requests[request.number] = request
        return self._follow(session, request)

    def decline(self, session: Session, message: Ask) -> None:
        """Answers with a miss without keeping the question, since too much waits already."""
        self._emit(RunAnswered(0, 0, len(message.digests) // 32, "queue_full", bool(message.prefix)))
        if session.scheduler is not None:
            session.scheduler.channel.send(Found(message.ticket, 0, b"", False, "queue_full"))

    def look(self) -> None:
        """Requests that waited for what has happened since the last look go on, the first in line first. Nothing
        lands between a look and the work of the same turn: a tier never answers inside a call."""
        news = self._news.take()
        for entry in news.landed:
            if entry.state is BlockState.RESIDENT:
                self._planner.landed(entry)
                self._migration.promoted(entry)
        served = [entry for entry in news.landed if entry.state is BlockState.RESIDENT and self.waiting.awaits(entry)]
        if served:
            self._answers.line_moves(entry.source for entry in served)
        again = self.waiting.take(news)
        if news.probed:
            again |= self._probes.answered()
        self._work.add(*self._again(again))

    def pause(self, sessions: Sequence[Session]) -> Work:
        """Answers requests that wait, since recalls are paused, and takes back blocks that a request knows of and that
        were not offered to its engine yet."""
        self.waiting.no_blocks()
        self._news.changed = True
        for session in sessions:
            for request in list(session.requests.values()):
                if not self._pauses.recalls:
                    return
                scheduler = session.scheduler
                known = request.told and not request.transfer and session.requests.get(request.number) is request
                if known and scheduler is not None:
                    scheduler.channel.send(GiveWay(request.number, PAUSED))
                yield WorkStep.DONE

    def _again(self, requests: dict[RecallRequest, Session]) -> list[Work]:
        """Work for these requests, the first in line first; none for one that is queued already."""
        fresh = sorted((t for t in requests if not t.queued), key=lambda request: request.turn.place)
        for request in fresh:
            request.queued = True
        return [self._follow(requests[request], request) for request in fresh]

    # following --------------------------------------------------------------------------------------------------------

    def _follow(self, session: Session, request: RecallRequest) -> Work:
        origins = session.origins(request.epoch)
        while True:
            if session.phase is not SessionPhase.LIVE or session.requests.get(request.number) is not request:
                self._held.give(session, len(request.digests))  # it ended while this was in the queue
                return
            if self._canaries.bars(origins):
                self._bar(request, "quarantined")
            elif self._pauses.recalls:
                self._bar(request, PAUSED)
            self._see_landed(request)
            if self._answers.due(request):
                self._answers.tell(session, request, more=True)
                yield WorkStep.DONE
                continue
            if added := self._growth.add_resident(session, request, origins):
                yield added
                continue
            obstacle = self._growth.add_next(session, request, origins)
            if obstacle is UNWEIGHED:
                yield from self._planner.survey(session, request, origins)
                self._end_of_known(request, origins)
                if request.short and not (self._pauses.recalls or self._canaries.bars(origins)):
                    self._planner.probe(session, request, origins)
                elif self._stack.shared and not (request.probed or request.short or request.ends_known in HERE):
                    yield from self._probes.run(session, request, origins)
            elif obstacle is UNPROBED:
                yield from self._probes.run(session, request, origins)
            elif obstacle is not None and not (
                self._goes_around(request) or (obstacle.reason == "pins" and self._takes_room(session, request))
            ):
                if not self._is_stuck(request) or request.probed or not self._stack.shared:
                    break
                yield from self._probes.run(session, request, origins)
            yield WorkStep.DONE
        self._stack.pump()
        self._see_landed(request)
        if self._is_stuck(request) and not self._probes.awaits(request):
            self._cut(request, request.landed, "tier_down")
            obstacle = Obstacle("tier_down", False)
        obstacle = self._weigh_again(session, request, final=not obstacle.waits) or obstacle
        request.queued = False
        self.waiting.woken(request)
        reason, waits = obstacle
        if waits:
            self.waiting.for_anything(request, session, starved=reason == "no_room")
        if request.landed < len(request.pinned):
            self.waiting.for_block(request.pinned[request.landed], request, session)
            if not waits or reason in ("filling", "mapping"):  # the tier's patience is what it waits with
                reason, waits = "staging", True
        new_wait, was_in_line = reason if waits else "", request.waiting in LINE
        if (
            request.landed > request.told
            or not waits
            or new_wait != request.waiting
            or self._answers.allowance_s(request) > request.allow_s  # another level reads its next block now
        ):
            request.waiting = new_wait
            self._answers.tell(session, request, more=waits, reason=reason)
        if not waits:
            if was_in_line and not request.ends:
                self._answers.line_moves(whole=True)
            self._probes.forget(request)  # the answer is final, whatever is found later
            self._stack.turns.wants(request.turn, 0)  # others may have had blocks of it read
            if not request.answered:
                missed = request.blocks - len(request.pinned)
                hits, staged = len(request.pinned), sum(request.promoted)
                self._emit(RunAnswered(hits, staged, missed, reason, bool(request.prefix)))
            request.answered = True

    def _end_of_known(self, request: RecallRequest, origins: tuple[Origin, ...]) -> None:
        """Takes note of why no more of the run is known to be somewhere and worth having."""
        at = request.known = min(request.known, request.most)
        if request.short or at == request.blocks:
            request.ends_known = request.short or "end"
            return
        ids = request.ids(at, origins)
        if self._index.find(*ids) is not None:
            request.ends_known = "filling"
        elif self._stack.find(*ids) is not None:
            request.ends_known = "tier_down"
        else:
            request.ends_known = self._growth.why_absent(ids)

    def _is_stuck(self, request: RecallRequest) -> bool:
        """True if the next block of the run is to come from a tier that is down."""
        level = self._answers.awaited(request)
        return level is not None and level.down

    def _goes_around(self, request: RecallRequest) -> bool:
        """Lets go of a block that is awaited from a tier that is down, where another tier has it. False: it was not
        so."""
        if request.ends or not self._is_stuck(request):
            return False
        source = self._stack.find(request.pinned[request.landed].id)
        around = source is not None and not source.level.down
        if around:
            self._cut(request, request.landed, "")
        return around

    def _takes_room(self, session: Session, request: RecallRequest) -> bool:
        """Room for pins is given by turns. The last in line that holds some for a block that is not being read yet
        lets go of it, if that one's turn is after this request's. False: there is none, and others are asked to give
        way."""
        after = [(t, of) for t, of in self.waiting.for_blocks() if self.pins.may_take(session, request, of, t)]
        if not after:
            self.pins.ask_way(session, request)
            return False
        last, of = max(after, key=lambda pair: pair[0].turn.place)
        if last.landed == len(last.pinned) - 1:
            self.waiting.no_block(last)
            self.waiting.for_anything(last, of, starved=False)
        self.pins.cut(last, len(last.pinned) - 1)
        return True

    def _bar(self, request: RecallRequest, reason: str) -> None:
        """Ends the answer with what was already sent: nothing of the request's namespace, or nothing at all, may be
        recalled."""
        self._cut(request, request.told, reason)
        request.landed = request.told

    def _cut(self, request: RecallRequest, blocks: int, reason: str) -> None:
        """Ends the run behind its first `blocks`, which its client may know of."""
        request.ends = reason
        if reason and blocks <= request.landed:
            self._stack.turns.wants(request.turn, 0)
        self.waiting.no_block(request)
        self.pins.cut(request, blocks)

    def _weigh_again(self, session: Session, request: RecallRequest, *, final: bool) -> Obstacle | None:
        """A run that needs nothing to be read is weighed when it is known; one that waits for blocks, whenever some
        have landed: what is not worth it any more is given up."""
        worth = max(self._planner.again(session, request, final=final), request.told)
        if worth >= len(request.pinned):
            return None
        self._cut(request, worth, request.short)
        request.landed = min(request.landed, worth)
        return Obstacle(request.short, False)

    def _see_landed(self, request: RecallRequest) -> None:
        """Counts what is RESIDENT of the run by now; the run ends before a block that could not be promoted."""
        pinned = request.pinned
        while request.landed < len(pinned):
            state = pinned[request.landed].state
            if state is BlockState.ABSENT:
                if pinned[request.landed].id not in self._index:  # else it was filled anew meanwhile
                    request.ends = "not_readable"
                self.pins.cut(request, request.landed)
                return
            if state is BlockState.FILLING:
                return
            request.landed += 1

    def give_way(self, session: Session, number: int) -> None:
        """The request has let go of its run for an earlier one that waits for room, which comes first now. It keeps its
        turn, and is told of its blocks anew."""
        request = session.requests.get(number)
        if request is None or request.transfer or not request.asked_way:
            return
        self._cut(request, 0, "")
        request.landed = request.told = 0
        request.asked_way, request.gave_way, request.waiting = False, True, ""
        request.extended = True  # what it waits for now is weighed, and so is its turn
        self.waiting.for_anything(request, session, starved=False)
        self._news.changed = True

    # recalling and letting go -----------------------------------------------------------------------------------------

    def recall(self, session: Session, message: Recall) -> None:
        """Turns pins into leases. The copy of a request that has ended fails its generation check, or the bytes are
        still the right ones."""
        request = session.requests.get(message.ticket)
        if request is None or request.transfer:
            self.transfers.early(session, message.transfer)
            if message.streamed:
                self.transfers.announce(session, Landed(message.transfer, b"", False, "gave_way"))
            return
        if request.weighed is not None:
            request.weighed.spare = max(0, message.spare)
        if message.streamed:
            self._stream(session, request, message)
            return
        entries = request.pinned[: request.told][message.first : message.first + message.count]
        self.transfers.begin(session, message.transfer, entries)
        if not message.compare:
            no_place = session.named(message.no_place)
            self._planner.ended(request, message.first + len(entries), message.waited_s, no_place)
        self.release(session, message.ticket)
        if not message.compare:
            self._emit(BlocksRecalled(len(entries), sum(e.nbytes for e in entries)))

    def _stream(self, session: Session, request: RecallRequest, message: Recall) -> None:
        """Blocks go to the workers from here on, those that have landed at once."""
        if not self.transfers.stream(session, request, message.transfer, message.first, message.count):
            self.release(session, message.ticket, message.waited_s)
            return
        request.waited_s = message.waited_s
        if len(request.pinned) > request.most:
            self._cut(request, request.most, request.short)
            request.landed = min(request.landed, request.most)
        if len(session.transfers[message.transfer].missing) < len(session.workers):
            self._cut(request, request.landed, "gave_way")
        self._work.add(*self._again({request: session}))

    def piece_copied(self, session: Session, rank: int, number: int, blocks: int) -> None:
        """This rank has copied the first `blocks` of a stream."""
        if self.transfers.copied(session, rank, number, blocks):
            self._answers.line_moves()

    def copied(self, session: Session, rank: int, numbers: list[int]) -> None:
        """This rank's copies of these transfers have ended. One that has not copied all of a stream has given it up:
        then the others need no more of it either."""
        for transfer in self.transfers.ended(session, rank, numbers):
            assert transfer.stream is not None
            stream, request = transfer.stream, transfer.stream.request
            released = session.requests.get(request.number) is not request
            if not transfer.missing:
                self._stream_ended(session, stream, released=released)
            elif not (released or stream.told_all):
                if request.weighed is not None:
                    self._planner.gives_up(request, request.weighed.stake_s)
                self._cut(request, request.landed, "gave_way")
                self._work.add(*self._again({request: session}))

    def _stream_ended(self, session: Session, stream: RecallStream, *, released: bool) -> None:
        request = stream.request
        waited_s = request.waited_s + self._clock.now() - stream.began
        self._planner.ended(request, stream.first + stream.done, waited_s)
        self._emit(BlocksRecalled(stream.done, stream.copied_bytes))
        if not released:
            self.release(session, request.number)

    def release(
        self,
        session: Session,
        number: int,
        waited_s: float = 0.0,
        no_place: NoPlace | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Ends a request, which has waited in vain so long. Its pins are let go, `at_once` or in slices."""
        request = session.requests.pop(number, None)
        if request is None:
            return
        self._planner.ended(request, 0, waited_s, session.named(no_place))
        self._stack.turns.wants(request.turn, 0)
        if request.transfer in session.transfers and session.phase is SessionPhase.LIVE:
            self.transfers.announce(session, Landed(request.transfer, b"", False, "gave_way"))
        if not request.queued:
            self._held.give(session, len(request.digests))
        self._probes.forget(request)
        self.waiting.woken(request)
        self.waiting.no_block(request)
        self.pins.let_go(request, at_once=at_once)
