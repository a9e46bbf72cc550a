"""Plans which part of a run is recalled and which is left to the engine: it is looked up, weighed before anything is
read, weighed again when blocks have landed, and compared with what happened.

run is known ──► decide ──► RecallDecided ──► blocks land: still worth it? ──► taken, given up ──► RecallEnded

The rule itself is `policies.decide`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from itertools import count

from stepwell import renamed
from stepwell.block.state import BlockState
from stepwell.block.tier import HOST
from stepwell.events import Expected, GivenUpTooSoon, PlaceMissed, RecallDecided, RecallEnded
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.sessions.costs import Costs
from stepwell.hierarchy.sessions.decision import EngineLoad, OpenDecision
from stepwell.hierarchy.sessions.session import RecallRequest, Session, SessionPhase
from stepwell.hierarchy.work import Work, WorkStep
from stepwell.policies.decide import Cost, RecallMode, RecallQuestion, Stretch, Why, cost_of, decide, least_cost
from stepwell.policies.probe import PROBE_BYTES
from stepwell.policies.turns import UNAWAITED, Place

MAX_TOKENS = 1 << 26
"""Largest believed number of a prompt's tokens."""

MAX_GIVEN_UP = 256
"""Blocks remembered that requests gave up waiting for."""

_MODES = {mode.value: mode for mode in RecallMode}


class RecallPlanner:
    """`mode` decides where a request has no wish of its own."""

    def __init__(self, core: Core, costs: Costs, stack: Stack, mode: RecallMode) -> None:
        self._clock = core.clock
        self._started = core.clock.now()
        self._emit = core.emit
        self._index = core.index
        self._costs = costs
        self._stack = stack
        self._default = mode
        self._numbers = count(1)
        self._given_up: OrderedDict[Entry, list[tuple[float, float]]] = OrderedDict()  # when, and at what cost

    def mode(self, wish: str) -> RecallMode:
        """The mode that a request with this wish has."""
        return _MODES.get(renamed.value("recall", wish), self._default)

    def follow(self, mode: RecallMode) -> None:
        """Sets the mode that decides where a request has no wish of its own."""
        self._default = mode

    def survey(self, session: Session, request: RecallRequest, origins: tuple[Origin, ...]) -> Work:
        """Looks where the blocks of the run are, those that are pinned and those behind them, and decides how much of
        it the request may have."""
        assert session.owner is not None
        nbytes = session.owner.slot_bytes * session.shards
        request.extended = False
        lies = [(HOST, request.landed)]
        for at in range(request.landed, request.blocks):
            tier = self._tier_of(request, at, origins)
            if tier is None:
                break
            if lies[-1][0] == tier:
                lies[-1] = tier, lies[-1][1] + 1
            else:
                lies.append((tier, 1))
            yield WorkStep.DONE
        if session.phase is SessionPhase.LIVE and session.requests.get(request.number) is request and not request.ends:
            request.known = sum(blocks for _, blocks in lies)
            places = {HOST: 0} | {level.name: level.number + 1 for level in self._stack.levels}
            request.lies = [(places[tier], blocks) for tier, blocks in lies]
            self._weigh(session, request, tuple(Stretch(tier, n, n * nbytes) for tier, n in lies if n))

    def probe(self, session: Session, request: RecallRequest, origins: tuple[Origin, ...]) -> None:
        """Reads a little from a tier that has just been refused, now and then and for no request, so that it is known
        when it has become faster."""
        first = max(request.most, len(request.pinned))
        left, parent = (
            PROBE_BYTES,
            request.pinned[-1] if request.pinned and request.most <= len(request.pinned) else None,
        )
        probed: Level | None = None
        for at in range(first, request.blocks):
            named = {origin.name(request.digests[32 * at : 32 * at + 32]): origin for origin in origins}
            source = self._stack.find(*named) if self._index.find(*named) is None else None
            if left <= 0 or source is None or source.level is not (probed or source.level):
                return
            level = probed = source.level
            if at == first and (level.reads.promoting or level.down or not level.reads.speed.probe()):
                return
            entry = level.promote(session, named[source.id], source.id, parent, UNAWAITED)
            if entry is None:
                return
            left, parent = left - entry.nbytes, entry

    def again(self, session: Session, request: RecallRequest, *, final: bool) -> int:
        """How many blocks of the run are worth having as things are now; those behind them are not, because of
        `request.short`. All, unless something is known by now that was not. `final`: it grows no more."""
        whole = len(request.pinned)
        if request.weighed is None:
            if not whole or request.landed < whole or not final or request.ends or request.short:
                return whole
            self._weigh(session, request, (Stretch(HOST, whole, sum(entry.nbytes for entry in request.pinned)),))
            return min(whole, request.most)
        if request.landed < whole and self._late(request.weighed, request.turn.place, request.landed):
            request.short = "late"
            return request.landed
        return whole

    def ended(
        self, request: RecallRequest, recalled: int, waited_s: float, no_place: PlaceMissed | None = None
    ) -> None:
        """The engine has taken so many blocks, and the request has waited so long for them; 0: it did not need them.
        `no_place`: it could not go on behind more of them. Nothing happens if the request was not weighed, or this was
        said before."""
        weighed, request.weighed = request.weighed, None
        if weighed is None:
            return
        waited_s = waited_s if 0 <= waited_s < 1e6 else 0.0
        wanted = weighed.decision.blocks - weighed.spare
        if no_place is not None:
            weighed.gave_up = "no_place"
        in_time = bool(request.prefix) and request.landed >= wanted  # all came, and the engine needs more than there is
        if waited_s and recalled < wanted and not (weighed.gave_up or in_time):
            weighed.gave_up = "limit"
            self.gives_up(request, weighed.stake_s)
        regret_s = best_s = None
        if not waited_s:
            weighed.load.until -= weighed.rest_s
        choice = waited_s and no_place is None and not request.prefix  # else there was none
        known = self._costs.known(weighed.load.tag, weighed.question.tokens, self._stack.speeds) if choice else None
        if known is not None and known.prefill is not None:
            best_s = least_cost(weighed.question, known).seconds
            spared = recalled + weighed.spare if recalled else 0
            took = cost_of(weighed.question, known, min(spared, weighed.question.blocks))
            regret_s = max(0.0, max(waited_s + took.copy_s, took.busy_s) + took.compute_s - best_s)
        gave_up, landed_s = weighed.gave_up if waited_s else "", weighed.landed_at - weighed.began
        self._emit(RecallEnded(weighed.number, recalled, waited_s, landed_s, gave_up, regret_s, best_s, no_place))

    def gives_up(self, request: RecallRequest, stake_s: float) -> None:
        """The request waits for its next block no more, which costs it `stake_s`."""
        if request.landed < len(request.pinned):
            given_up = self._given_up.setdefault(request.pinned[request.landed], [])
            if len(given_up) < MAX_GIVEN_UP:
                given_up.append((self._clock.now(), stake_s))
            if len(self._given_up) > MAX_GIVEN_UP:
                self._given_up.popitem(last=False)

    def landed(self, entry: Entry) -> None:
        """A block has come, which requests may have given up."""
        for at, stake_s in self._given_up.pop(entry, ()):
            if (regret_s := stake_s - (self._clock.now() - at)) > 0:
                self._emit(GivenUpTooSoon(regret_s))

    def _tier_of(self, request: RecallRequest, at: int, origins: tuple[Origin, ...]) -> str | None:
        """Where this block would come from; None: it is nowhere, or an engine is filling it."""
        ids = request.ids(at, origins)
        entry = self._index.find(*ids)
        if entry is None:
            source = self._stack.find(*ids)
            return source.level.name if source is not None and not source.level.down else None
        if (level := self._stack.promoting(entry)) is not None:
            return level.name
        return HOST if entry.state is BlockState.RESIDENT else None

    def _weigh(self, session: Session, request: RecallRequest, stretches: tuple[Stretch, ...]) -> None:
        """`stretches`: where the request's leading run lies."""
        assert session.scheduler is not None
        load = session.load = session.load or EngineLoad(session.tag)
        self.ended(request, 0, 0.0)  # it was weighed when its run was shorter
        block_tokens, now = session.scheduler.hello.block_tokens, self._clock.now()
        blocks = sum(stretch.blocks for stretch in stretches)
        tokens = min(max(request.tokens, blocks * block_tokens, 1), MAX_TOKENS)
        turns, nbytes = self._stack.turns, _below(stretches, blocks)
        queued = self._stack.ahead(turns.place(request.turn, nbytes))
        question = RecallQuestion(tokens, block_tokens, stretches, queued, load.busy_s(now))
        known, mode = self._costs.known(load.tag, tokens, self._stack.speeds), self.mode(request.recall)
        decision = decide(question, known, mode)
        rest_s = decision.chosen.compute_s if decision.chosen is not None else 0.0
        stake_s = 0.0
        if decision.chosen is not None and request.landed < decision.blocks:
            stake_s = cost_of(question, known, request.landed).seconds - decision.chosen.seconds
        load.compute(now, rest_s)
        number = next(self._numbers)
        request.weighed = OpenDecision(number, load, question, mode, decision, now, now, 0, rest_s, stake_s)
        if decision.blocks < blocks:
            request.most, request.short = decision.blocks, decision.why.value
        turns.wants(request.turn, _below(stretches, decision.blocks))
        by_tier: Counter[str] = Counter()
        for stretch in stretches:
            by_tier[stretch.tier] += stretch.blocks
        self._emit(
            RecallDecided(
                number,
                now - self._started,
                tokens,
                block_tokens,
                dict(by_tier),
                queued,
                decision.blocks,
                decision.why.value,
                decision.limit_s,
                max((known.forgiven(tier) for tier in by_tier if tier != HOST), default=known.doubt),
                question.busy_s,
                _expected(decision.chosen),
                _expected(decision.whole),
                decision.none.compute_s if decision.none is not None else None,
                _number(session.requests.get(request.prefix)) if request.prefix else None,
            )
        )

    def _late(self, weighed: OpenDecision, place: Place, landed: int) -> bool:
        """`landed` blocks are in the arena by now, and the rest is not worth waiting for any more."""
        if landed == weighed.landed:
            return False
        weighed.landed, weighed.landed_at = landed, self._clock.now()
        if weighed.decision.none is None:
            return False
        rest = _behind(weighed.question.stretches, landed, weighed.decision.blocks)
        busy_s = weighed.load.busy_s(self._clock.now()) - weighed.rest_s  # its own rest is among that
        queued = self._stack.ahead(place)
        question = replace(weighed.question, stretches=rest, queued=queued, busy_s=max(0.0, busy_s))
        known = self._costs.known(weighed.load.tag, question.tokens, self._stack.speeds)
        again = decide(question, known, weighed.mode)
        if again.whole is not None:
            weighed.stake_s = cost_of(question, known, min(landed, question.blocks)).seconds - again.whole.seconds
        if again.why is not Why.RECOMPUTE_CHEAPER or again.blocks > landed:
            return False
        weighed.gave_up = "late"
        return True


def _below(stretches: tuple[Stretch, ...], blocks: int) -> int:
    """Bytes of the first `blocks` that are not in the arena."""
    return sum(stretch.nbytes for stretch in _behind(stretches, 0, blocks) if stretch.tier != HOST)


def _number(request: RecallRequest | None) -> int:
    """Of the decision on this request that has not ended; 0: there is none."""
    return request.weighed.number if request is not None and request.weighed is not None else 0


def _expected(cost: Cost | None) -> Expected | None:
    return Expected(cost.blocks, cost.recall_s, cost.compute_s) if cost is not None else None


def _behind(stretches: tuple[Stretch, ...], landed: int, wanted: int) -> tuple[Stretch, ...]:
    """The first `wanted` blocks when the first `landed` of them are in the arena."""
    found: list[Stretch] = []
    at = 0
    for stretch in stretches:
        for start, end, tier in ((at, landed, HOST), (max(at, landed), wanted, stretch.tier)):
            blocks = min(end, at + stretch.blocks) - start
            if blocks > 0:
                found.append(Stretch(tier, blocks, stretch.nbytes * blocks // stretch.blocks))
        at += stretch.blocks
    return tuple(found)
