"""For how long each hook of the adapter keeps vLLM's scheduler thread, with the well serving and with the well stopped.

The halves of the adapter are called as vLLM calls them (see `standin`), over a real socket to a real well. A request
comes twice: once cold, so that it spills, and once recalled. Then the well is halted by SIGSTOP, as a wedged one would
be, and more requests come. Times are wall time: what another process takes of this core while a hook runs is in them,
so the 99th percentile needs a quiet machine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.bench import processes, wells
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats

if TYPE_CHECKING:
    from lab.bench.halves.standin import StandIn

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens, first",
    "get_num_new_matched_tokens, again",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
BOUND_US, FIRST_ASK_US, PER_1K_US = 200.0, 1000.0, 50.0
SHORT = (600, 1100, 2000, 3000, 4096)
"""Prompt lengths in tokens."""

_HOST = 1 << 30
_PAUSE_S = 0.004  # a short forward's time: the link's thread gets its turn meanwhile, as in an engine
_OUTPUT = 8
_TOGETHER = 4
_FLOOR = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """`rounds` over the short lengths, each request twice; `stopped` rounds with a stopped well; `long_rounds` over the
    long lengths."""

    rounds: int
    stopped: int
    long_rounds: int
    long: Sequence[int]


FULL, QUICK = Size(60, 30, 40, (8 << 10, 32 << 10, 128 << 10)), Size(1, 1, 2, (8 << 10,))


def run(quick: bool) -> Result:
    from lab.bench.halves.standin import Kv, StandIn

    size = QUICK if quick else FULL
    rows: list[Row] = []
    troubles = 0
    requests = 0
    floor: list[float] = []
    for block_tokens in (128, 16):
        kv = Kv(page=block_tokens, block_tokens=block_tokens, pages=65536 // block_tokens)
        judged = block_tokens == 128
        with wells.well(_HOST) as home, StandIn(home, kv, pause_s=_PAUSE_S) as engine:
            engine.wait_ready()
            floor += _requests(engine, size.rounds)
            rows += _rows(engine, f"{block_tokens}-token blocks", judged)
            short = _of(engine, "on_new_request", 4096)
            rows += _slopes(engine, size, short, judged)
            engine.times.clear()
            with processes.halted([wells.process(home)]):
                floor += _requests(engine, size.stopped)
            rows += _rows(engine, f"{block_tokens}-token blocks, well stopped", judged)
            requests += len(engine.receipts)
            troubles += len(engine.troubles)
    rows.append(_floor(floor))
    remarks = [
        "measured: the 99th percentile",
        "vLLM on CPUs has pages of 128 tokens; blocks of 16, such as on a GPU, are for reading",
    ]
    return Result("hooks", rows, {"requests": requests, "exceptions_in_hooks": troubles}, remarks)


def _requests(engine: StandIn, rounds: int) -> list[float]:
    """Each prompt twice, several requests at a time, as a batch under way makes the steps' hooks longer. Between them,
    seconds of a fixed piece of Python that has nothing to do with stepwell."""
    from lab.bench.halves.standin import prompts

    floor = []
    for _ in range(rounds):
        source = [next(prompts(length, secrets.randbits(64))) for length in SHORT]
        for _ in range(2):
            for at in range(0, len(source), _TOGETHER):
                for prompt in source[at : at + _TOGETHER]:
                    engine.add(prompt, _OUTPUT)
                    engine.step()
                    began = time.perf_counter()
                    sum(range(_FLOOR))
                    floor.append(time.perf_counter() - began)
                engine.run()
    return floor


def _floor(seconds: Sequence[float]) -> Row:
    """What this machine does to a hook: work of about its length, at the same moments."""
    half = stats.median(seconds).times(1e6).value
    p99 = stats.percentile(seconds, 99).times(1e6)
    return Row("for comparison: the sum of 10,000 numbers in Python", "us", p99, beside=f"p50 {half:.0f}")


def _rows(engine: StandIn, where: str, judged: bool) -> list[Row]:
    rows = []
    for hook in HOOKS:
        calls = engine.times[hook]
        if not calls:
            rows.append(Row(f"{hook}, {where}", "us", None, beside="never called"))
            continue
        wall, cpu = [call.wall_s for call in calls], [call.cpu_s for call in calls]
        target = Target("<=", FIRST_ASK_US if hook.endswith("first") else BOUND_US) if judged else None
        half, cpu99 = stats.median(wall).times(1e6), stats.percentile(cpu, 99).times(1e6)
        beside = f"p50 {half.value:.0f}; p99 of the thread's own CPU time {cpu99.value:.0f}"
        rows.append(Row(f"{hook}, {where}", "us", stats.percentile(wall, 99).times(1e6), target, beside))
    return rows


def _of(engine: StandIn, hook: str, tokens: int) -> list[float]:
    return [call.wall_s for call in engine.times[hook] if call.tokens == tokens]


def _slopes(engine: StandIn, size: Size, short: Sequence[float], judged: bool) -> list[Row]:
    """What longer prompts cost in `on_new_request` beyond 4K tokens, by 1K tokens. Nothing else is done with them."""
    from lab.bench.halves.standin import prompts

    rows = []
    for length in size.long:
        prompt = next(prompts(length, length))
        seconds = []
        for _ in range(size.long_rounds):
            request = engine.request(prompt)
            began = time.perf_counter()
            engine.scheduler.on_new_request(request)
            seconds.append(time.perf_counter() - began)
            time.sleep(_PAUSE_S)
            engine.scheduler.finished(request)
        further = length / 1024 - 4
        more = stats.percentile(seconds, 99)
        base = stats.percentile(short, 99).value
        slope = more.plus(-base).times(1e6 / further)
        half = (stats.median(seconds).value - stats.median(short).value) * 1e6 / further
        what = f"on_new_request, {length >> 10}K tokens, each 1K beyond 4K, {engine.kv.block_tokens}-token blocks"
        rows.append(Row(what, "us", slope, Target("<=", PER_1K_US) if judged else None, f"p50 {half:.0f}"))
    return rows
