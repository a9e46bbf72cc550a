"""A tier that takes its time, on a clock that stands still until the harness moves it.

One device: blocks are served one after the other, `block_s` each, and a call is answered `latency_s` after its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stepwell.block.namespace import BlockId
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.hierarchy.core import Limits, Options, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.levels import level, reads, writes
from stepwell.hierarchy.local import InlineExecutor, LocalWell
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.policies.decide import RecallMode
from stepwell.testing.clock import SetClock
from stepwell.testing.dict_tier import DictTier
from stepwell.testing.sparse import SparseMemory
from stepwell.tiers.base import Incoming, Outgoing, ReadDone, WriteDone
from stepwell.vault.keyring import Keyring

from .build import Setup
from .local import Engine, setup_in


class SlowTier(DictTier):
    """`latency_s` and `block_s` may be changed at any time; `hung`: nothing is answered while it is set. `asked` are
    the blocks that were read, in order."""

    name = "disk"

    def __init__(self, limit: int, executor: InlineExecutor, clock: SetClock) -> None:
        super().__init__(limit, executor)
        self.latency_s = 0.0
        self.block_s = 0.0
        self.hung = False
        self.asked: list[BlockId] = []
        self.keyring = Keyring.ephemeral()
        self._clock = clock
        self._free_at = 0.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def read(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        self.asked += [block.id for block in blocks]
        self._serve(len(blocks), lambda: DictTier.read(self, blocks, done))

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        self._serve(len(blocks), lambda: DictTier.write(self, blocks, done))

    def _serve(self, blocks: int, call: Callable[[], None]) -> None:
        self._free_at = max(self._free_at, self._clock.now()) + blocks * self.block_s
        self._calls.append((self._free_at + self.latency_s, call))

    def tick(self) -> None:
        """Answers what is due by now."""
        if self.hung:
            return
        due = [call for at, call in self._calls if at <= self._clock.now()]
        self._calls = [(at, call) for at, call in self._calls if at > self._clock.now()]
        for call in due:
            call()


class SlowEngine(Engine):
    """An engine whose time is `clock`: a step that computes takes `step_s` and `token_s` for each token, an empty one
    `idle_s`. The tier answers meanwhile. `started`: when each request got its pages."""

    def __init__(self, setup: Setup, well: LocalWell, tier: SlowTier, clock: SetClock) -> None:
        self.tier = tier
        self.clock = clock
        self.step_s, self.token_s, self.idle_s = 0.005, 0.0, 0.001
        self.started: dict[str, float] = {}
        self.watch: Callable[[], None] = lambda: None
        """Called whenever the well has moved."""
        self.threads = True
        """Streams are copied as if by a thread; otherwise in the engine's steps alone."""
        super().__init__(setup, well)

    def _start(self) -> None:
        super()._start()
        self.client._clock = self.half.live.clock = self.clock.now
        for worker in self.worker_clients:
            worker._streams.clock = self.clock.now
        allocated = self.half.allocated

        def noted(request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
            self.started.setdefault(request.request_id, self.clock.now())
            allocated(request, tables, external)

        self.half.allocated = noted  # type: ignore[method-assign]

    def step(self) -> bool:
        executed = super().step()
        tokens = self.last_plan.total_num_scheduled_tokens if executed else 0
        until = self.clock.now() + (self.step_s + tokens * self.token_s if executed else self.idle_s)
        while self.clock.now() < until:
            self.clock.advance(min(0.01, until - self.clock.now()))
            self.settle()
        return executed

    def put_below(self, prompts: Sequence[list[int]]) -> None:
        """Computes these prompts in no time; afterwards their blocks are in the tier alone."""
        for tokens in prompts:
            self.add(tokens)
            self.run_slowly()
            super().settle()
            while not self.well.hierarchy.stack.levels[0].writes.idle:
                self.settle()
        self.forget()
        arena = self.well.hierarchy.arena
        for entry in reversed(self.entries()):
            arena.drop(entry, "evicted")

    def settle(self) -> None:
        """The tier answers what is due, the well takes it in, and workers copy what has landed of streams."""
        self.tier.tick()
        self.well.pump()
        for worker in self.workers if self.threads else ():
            worker.connector._work._streams.poll()
        self.watch()

    def rest(self) -> None:
        """Nobody asks for anything; what is under way in the tier ends."""
        below = self.well.hierarchy.stack.levels[0]
        while below.reads.promoting or not below.writes.idle:
            self.clock.advance(0.1)
            self.settle()

    def run_until_started(self, rid: str) -> None:
        """Until the request has its pages."""
        while rid not in self.started:
            self.step()

    def run_slowly(self, max_steps: int = 100_000) -> None:
        """To idle, in the clock's time alone."""
        for _ in range(max_steps):
            if not self.busy():
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")


@contextmanager
def slow_engine(
    folder: Path,
    *,
    host: int,
    block_bytes: int,
    extra: dict[str, Any] | None = None,
    after: SlowTier | None = None,
    batch: int = 4,
    lanes: bool = False,
    **fields: Any,
) -> Iterator[SlowEngine]:
    """One engine over a well whose blocks have `block_bytes`: the tier is called for as many of them at once (`batch`)
    as it is for half a megabyte each in a real one. `after`: the tier of an engine that has ended, with its blocks.
    `lanes`: threads copy streams; otherwise that happens whenever the clock has moved."""
    clock, executor = (SetClock(1000.0), InlineExecutor()) if after is None else (after._clock, after._executor)
    tier = after or SlowTier(1 << 40, executor, clock)
    assert isinstance(executor, InlineExecutor)
    hierarchy = Hierarchy(
        Limits(host, queue_bytes=host // 8),
        System(clock, executor, SparseMemory()),
        Sealing(tier.keyring, sealed=True, wall=clock.now),
        Options(recall=RecallMode.ALWAYS),  # the tier's time is the clock's, and the engine's is not: no weighing them
        well="slow",
        tiers=(tier,),
    )
    hierarchy.recover()
    with (
        patch.object(level, "MAX_BATCH", batch * block_bytes),
        patch.object(reads, "MAX_BATCH", batch * block_bytes),
        patch.object(reads, "MIN_BATCH", block_bytes),
        patch.object(writes, "MAX_BATCH", 4 * block_bytes),
        patch.object(StepwellConnector, "lanes", lanes),
        LocalWell(hierarchy, executor) as well,
        SlowEngine(setup_in(folder, extra=extra, **fields), well, tier, clock) as h,
    ):
        yield h
        well.check()
