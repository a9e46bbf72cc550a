"""One engine: its own prefix cache, the tiers that it reaches, and its GPU, which computes prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepwell.block.tier import HOST
from stepwell.policies.costs.prefill import PrefillCost
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.decide import Decision, KnownCosts, RecallMode, RecallQuestion, Stretch, decide
from stepwell.simulate.fleet.clock import EventClock
from stepwell.simulate.fleet.recall import SimulatedRecall, parts_of
from stepwell.simulate.fleet.server import SharedServer
from stepwell.simulate.fleet.tier import GPU, SimulatedLevel, SimulatedTier


@dataclass(slots=True, eq=False)
class Prompt:
    """One request and its outcome. `number`: its place in the trace. It is computed from `started` to `done`, when its
    first token is there."""

    number: int
    first: int
    last: int
    tokens: int
    arrived: float
    engine: int = -1
    recall_s: float = 0.0  # at the engine that finished it
    started: float = 0.0
    done: float = 0.0
    found: list[tuple[str, int]] = field(default_factory=list)  # level, and up to which block
    decision: Decision | None = None
    lost: int = 0  # times that an engine was lost with it


@dataclass(frozen=True, slots=True)
class Ways:
    """Properties that the engines of one fleet share."""

    clock: EventClock
    prefill: PrefillCost
    mode: RecallMode
    block_tokens: int
    block_bytes: int


class SimulatedEngine:
    """One engine. `copies` copies blocks into its GPU; the engines of a host share it. `tiers`: the nearest first."""

    def __init__(
        self, index: int, host: int, ways: Ways, gpu: SimulatedLevel | None, tiers: Sequence[SimulatedTier],
        copies: SharedServer, copy_speed: TierSpeed, prefills: int,
    ) -> None:  # fmt: skip
        self.index, self.host = index, host
        self.ways = ways
        self.gpu = gpu
        self.tiers = tiers
        self.levels: list[SimulatedLevel] = [gpu, *tiers] if gpu is not None else list(tiers)
        self.copies, self.copy_speed = copies, copy_speed
        self.compute = SharedServer(ways.clock, 1.0, prefills, 1.0)
        self.up = True
        self.down_until = 0.0
        self.spent_s = 0.0  # GPU seconds
        self.copied_bytes = 0  # into the GPU
        self.waiting_tokens = 0  # accepted and not yet computed
        self.under_way: dict[Visit, None] = {}

    def arrive(self, prompt: Prompt) -> None:
        visit = Visit(self, prompt)
        self.under_way[visit] = None
        visit.begin()

    def stop(self) -> list[Prompt]:
        """Stops the engine and loses its memory. Returns the prompts that it had not finished."""
        self.up = False
        if self.gpu is not None:
            self.gpu.lose()
        self.compute.fail()
        lost = list(self.under_way)
        self.under_way.clear()
        self.waiting_tokens = 0
        for visit in lost:
            visit.end()
        return [visit.prompt for visit in lost]

    def copy(self, nbytes: int, done: Callable[[], None]) -> None:
        """Copies bytes from host memory into the GPU, after other copies of its host."""
        self.copied_bytes += nbytes
        self.copies.submit(nbytes, lambda: self.ways.clock.after(self.copy_speed.latency_s, done))

    def locate(self, first: int, last: int) -> list[tuple[SimulatedLevel, int]]:
        """The leading run of these ids: levels, and up to which position each is the nearest that has them."""
        now = self.ways.clock.now
        held = [(level, level.refer(now, first, last)) for level in self.levels]
        found: list[tuple[SimulatedLevel, int]] = []
        at = 0
        while True:
            end = last - first
            for level, stretches in held:
                inside = next((b for a, b in stretches if a <= at < b), None)
                if inside is not None:
                    at = min(end, inside)
                    found.append((level, at))
                    break
                # A nearer level may have blocks again from here on.
                end = min(end, next((a for a, _ in stretches if a > at), end))
            else:
                return found

    def known(self, tiers: Sequence[SimulatedTier]) -> KnownCosts:
        speeds = {tier.name: tier.speed for tier in tiers if tier.name != HOST}
        return KnownCosts(self.ways.prefill, 0.0, {**speeds, GPU: TierSpeed(0.0, 0.0), HOST: self.copy_speed})


class Visit:
    """A prompt at an engine: recalled, then computed. What an engine's failure leaves of it changes nothing."""

    def __init__(self, engine: SimulatedEngine, prompt: Prompt) -> None:
        self.engine, self.prompt = engine, prompt
        self._found: list[tuple[SimulatedLevel, int]] = []
        self._recall: SimulatedRecall | None = None
        self._new = 0
        self._came = engine.ways.clock.now

    def begin(self) -> None:
        engine, prompt, ways = self.engine, self.prompt, self.engine.ways
        self._found = engine.locate(prompt.first, prompt.last)
        parts = parts_of(self._found)
        stretches = tuple(
            Stretch(level.name, count, count * ways.block_bytes if isinstance(level, SimulatedTier) else 0)
            for level, count in parts
        )
        tiers = [level for level, _ in parts if isinstance(level, SimulatedTier)]
        queued = {tier.name: tier.queued_bytes for tier in tiers if tier.name != HOST}
        request = RecallQuestion(max(1, prompt.tokens), ways.block_tokens, stretches, queued)
        prompt.decision = decision = decide(request, engine.known(tiers), ways.mode)
        local = parts[0][1] if parts and parts[0][0] is engine.gpu else 0
        cut = max(decision.blocks, local)
        self._expect(cut)
        self._recall = SimulatedRecall(ways.clock, ways.block_bytes, engine.copy, parts, cut, self._ready)
        self._recall.begin(decision.limit_s)

    def end(self) -> None:
        """The engine has stopped."""
        if self._recall is not None:
            self._recall.stop()

    def _expect(self, blocks: int) -> None:
        new = max(0, self.prompt.tokens - blocks * self.engine.ways.block_tokens)
        self.engine.waiting_tokens += new - self._new
        self._new = new

    def _ready(self, blocks: int) -> None:
        self.prompt.recall_s = self.engine.ways.clock.now - self._came
        self._found = [(level, min(end, blocks)) for level, end in self._found]
        self._expect(blocks)
        self.engine.compute.submit(0.0, self._done, begin=self._start)

    def _start(self) -> float:
        """Seconds that computing takes. What the GPU has got since the prompt came is not computed again."""
        engine, prompt, ways = self.engine, self.prompt, self.engine.ways
        prompt.started = ways.clock.now
        blocks = self._found[-1][1] if self._found else 0
        local = engine.gpu.leading(prompt.first, prompt.last) if engine.gpu is not None else 0
        if local > blocks:
            self._found.append((engine.levels[0], local))
            blocks = local
        known = min(blocks * ways.block_tokens, prompt.tokens - 1)  # an engine computes at least the last token
        seconds = ways.prefill.seconds(prompt.tokens - known, known) if prompt.tokens else 0.0
        engine.spent_s += seconds
        return seconds

    def _done(self) -> None:
        engine, prompt = self.engine, self.prompt
        prompt.done = engine.ways.clock.now
        prompt.engine = engine.index
        prompt.found = [(level.name, end) for level, end in self._found]
        del engine.under_way[self]
        engine.waiting_tokens -= self._new
        for level in engine.levels:
            level.there(prompt.first, prompt.last)
