"""A trace on a fleet: built from its description, and run until the last request has its first token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from stepwell.block.tier import HOST
from stepwell.policies.catalog import POLICIES
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.decide import RecallMode
from stepwell.simulate.fleet import description
from stepwell.simulate.fleet.clock import EventClock
from stepwell.simulate.fleet.description import Failure, Fleet, fits
from stepwell.simulate.fleet.engine import Prompt, SimulatedEngine, Ways
from stepwell.simulate.fleet.routing import KvAware, PrefixAffinity, RandomRouter, RoundRobin, Router
from stepwell.simulate.fleet.server import SharedServer
from stepwell.simulate.fleet.tier import GPU, SimulatedLevel, SimulatedTier
from stepwell.simulate.fleet.view import LevelWatch, Unseen, View
from stepwell.simulate.store import Store
from stepwell.simulate.traces.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """State at the end: the prompts in the order of the trace, and all servers."""

    prompts: list[Prompt]
    engines: list[SimulatedEngine]
    tiers: dict[str, list[SimulatedTier]]  # by name, the nearest first
    seconds: float  # from the first request to the last first token


def play(fleet: Fleet, trace: Trace) -> Played:
    """Raises ConfigError SW-126 as `description.fits` does."""
    fits(fleet, trace)
    return _Play(fleet, trace).run()


class _Play:
    def __init__(self, fleet: Fleet, trace: Trace) -> None:
        self._fleet, self._trace = fleet, trace
        self._clock = EventClock()
        self._prefill = fleet.prefill_cost
        self._block_bytes = fleet.token_bytes * trace.block_tokens
        seen = fleet.routing.by == "kv_aware"
        # Places of the view: the GPU of each engine, then the tiers of each host.
        own = [name for name, _ in fleet.below() if name != "shared"]
        self._own = {name: fleet.engines + i * fleet.hosts for i, name in enumerate(own)}
        places = fleet.engines + len(own) * fleet.hosts
        self._view = View(self._clock, trace, places, fleet.routing.stale) if seen else None
        self._shared = [self._tier(name, like, 0) for name, like in fleet.below() if name == "shared"]
        self._tiers: list[list[SimulatedTier]] = [
            [self._tier(name, like, host) for name, like in fleet.below() if name != "shared"] + self._shared
            for host in range(fleet.hosts)
        ]
        for tiers in self._tiers:
            for above, below in pairwise(tiers):
                above.below = below
        self._prompts: list[Prompt] = []
        self._homeless: list[Prompt] = []
        self._engines = self._make_engines()
        self._router = self._make_router()

    def run(self) -> Played:
        for failure in self._fleet.failures.values():
            self._clock.at(failure.at, partial(self._fail, failure))
        if len(self._trace):
            self._clock.at(0.0, self._next)
        self._clock.run()
        by_name: dict[str, list[SimulatedTier]] = {}
        for tier in dict.fromkeys(tier for tiers in self._tiers for tier in tiers):
            by_name.setdefault(tier.name, []).append(tier)
        ordered = {name: by_name[name] for name, _ in self._fleet.below()}
        return Played(self._prompts, self._engines, ordered, max((p.done for p in self._prompts), default=0.0))

    def _next(self) -> None:
        """The next request of the trace comes, and sees to that the one after it will."""
        trace, i = self._trace, len(self._prompts)
        first, last = int(trace.starts[i]), int(trace.starts[i + 1])
        prompt = Prompt(i, first, last, int(trace.inputs[i]), self._clock.now)
        self._prompts.append(prompt)
        if i + 1 < len(trace):
            self._clock.at(float(trace.times[i + 1]) / self._fleet.speed, self._next)
        self._send(prompt)

    def _send(self, prompt: Prompt) -> None:
        up = [engine for engine in self._engines if engine.up]
        if up:
            self._router.choose(prompt, up).arrive(prompt)
        else:
            self._homeless.append(prompt)

    # --- failures

    def _fail(self, failure: Failure) -> None:
        if failure.what == "engine_restart":
            assert failure.engine is not None
            self._stop([self._engines[failure.engine]], failure.down)
        elif failure.what == "host_restart":
            for tier in self._tiers[failure.host or 0]:
                if tier.name == HOST:
                    tier.lose()
            self._stop([engine for engine in self._engines if engine.host == failure.host], failure.down)
        else:
            assert failure.until is not None
            for tier in self._named(failure):
                if failure.what == "slow":
                    tier.slow(failure.factor)
                    self._clock.at(failure.until, partial(tier.recover, failure.factor))
                else:
                    tier.go()
                    self._clock.at(failure.until, tier.come_back)

    def _named(self, failure: Failure) -> list[SimulatedTier]:
        hosts = range(self._fleet.hosts) if failure.host is None else (failure.host,)
        tiers = [tier for host in hosts for tier in self._tiers[host] if tier.name == failure.tier]
        return list(dict.fromkeys(tiers))

    def _stop(self, engines: list[SimulatedEngine], down: float) -> None:
        """Stops the engines; they return after `down` seconds, empty. Their unfinished prompts are sent again, in the
        order in which they came."""
        lost = [prompt for engine in engines if engine.up for prompt in engine.stop()]
        for engine in engines:
            engine.down_until = max(engine.down_until, self._clock.now + down)
        self._clock.after(down, lambda: self._start(engines))
        for prompt in sorted(lost, key=lambda prompt: prompt.number):
            prompt.lost += 1
            self._send(prompt)

    def _start(self, engines: list[SimulatedEngine]) -> None:
        for engine in engines:
            engine.up = self._clock.now >= engine.down_until
        waiting, self._homeless = self._homeless, []
        for prompt in waiting:
            self._send(prompt)

    # --- building

    def _cost(self, first: int, last: int) -> float:
        return self._prefill.seconds(last - first, first)

    def _watch(self, place: int) -> LevelWatch:
        return self._view.watch(place) if self._view is not None else Unseen()

    def _tier(self, name: str, like: description.TierDescription, host: int) -> SimulatedTier:
        most = self._fleet.engine.link if name == HOST else float("inf")
        watch = self._watch(self._own[name] + host) if name in self._own else Unseen()
        return SimulatedTier(
            name, like, self._clock, self._trace, self._cost, self._block_bytes, watch=watch, most=most
        )

    def _make_engines(self) -> list[SimulatedEngine]:
        fleet = self._fleet
        ways = Ways(self._clock, self._prefill, RecallMode(fleet.decide), self._trace.block_tokens, self._block_bytes)
        engines = []
        for host, tiers in enumerate(self._tiers):
            copies, speed = self._copies(tiers)
            for index in range(host * fleet.engines_per_host, (host + 1) * fleet.engines_per_host):
                gpu = self._gpu(index) if fleet.engine.prefix_caching else None
                if gpu is not None and tiers:
                    gpu.below = tiers[0]
                engines.append(SimulatedEngine(index, host, ways, gpu, tiers, copies, speed, fleet.engine.prefills))
        return engines

    def _gpu(self, index: int) -> SimulatedLevel:
        capacity = self._fleet.engine.kv_capacity // self._block_bytes
        trace, cost = self._trace, self._cost
        return SimulatedLevel(
            GPU, lambda left: Store(trace, POLICIES["lru"](), capacity, cost, left), self._watch(index)
        )

    def _copies(self, tiers: list[SimulatedTier]) -> tuple[SharedServer, TierSpeed]:
        """The server that copies blocks into the GPUs of a host, and its speed: it reads the host's memory or passes
        through it."""
        fleet = self._fleet
        if tiers and tiers[0].name == HOST:
            return tiers[0].reads, tiers[0].speed
        link = fleet.engine.link
        server = SharedServer(self._clock, link * fleet.engines_per_host, fleet.engines_per_host, link)
        return server, TierSpeed(0.0, 1 / link)

    def _make_router(self) -> Router:
        fleet, routing = self._fleet, self._fleet.routing
        match routing.by:
            case "random":
                return RandomRouter(fleet.seed)
            case "prefix_affinity":
                return PrefixAffinity(self._trace, routing.prefix_blocks)
            case "kv_aware":
                assert self._view is not None
                places = [[e.index, *(start + e.host for start in self._own.values())] for e in self._engines]
                return KvAware(self._view, places, self._trace.block_tokens, routing.load_weight)
        return RoundRobin()
