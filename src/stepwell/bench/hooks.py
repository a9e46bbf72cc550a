"""For how long each hook of the adapter keeps vLLM's scheduler thread, with the well serving and with the well stopped.

The halves of the adapter are called as vLLM calls them (see `standin`), over a real socket to a real well. A request
comes twice: once cold, so that it spills, and once recalled. Then the well is halted by SIGSTOP, as a wedged one would
be, and as many requests come again. Times are wall time: what another process takes of this core while a hook runs is in
them, so the 99th percentile needs a quiet machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.bench import stats, wells
from stepwell.bench.report import Result, Row, Target

if TYPE_CHECKING:
    from stepwell.bench.standin import StandIn

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
    from stepwell.bench.standin import Kv, StandIn

    size = QUICK if quick else FULL
    rows: list[Row] = []
    troubles = 0
    requests = 0
    for block_tokens in (128, 16):
        kv = Kv(page=block_tokens, block_tokens=block_tokens, pages=65536 // block_tokens)
        judged = block_tokens == 128
        with wells.well(_HOST) as home, StandIn(home, kv, pause_s=_PAUSE_S) as engine:
            engine.wait_ready()
            _requests(engine, size.rounds)
            rows += _rows(engine, f"{block_tokens}-token blocks", judged)
            short = _of(engine, "on_new_request", 4096)
            rows += _slopes(engine, size, short, judged)
            engine.times.clear()
            with _stopped(home):
                _requests(engine, size.stopped)
            rows += _rows(engine, f"{block_tokens}-token blocks, well stopped", judged)
            requests += len(engine.receipts)
            troubles += len(engine.troubles)
    remarks = [
        "128-token blocks are this engine's own (its page); 16-token blocks are for reading, vLLM on a GPU has such pages"
    ]
    return Result("hooks", rows, {"requests": requests, "exceptions_in_hooks": troubles}, remarks)


def _requests(engine: StandIn, rounds: int) -> None:
    """Each prompt twice, several requests at a time, as a batch under way makes the steps' hooks longer."""
    from stepwell.bench.standin import prompts

    for number in range(rounds):
        source = [next(prompts(length, hash((number, length, time.monotonic_ns())))) for length in SHORT]
        for _ in range(2):
            for at in range(0, len(source), _TOGETHER):
                for prompt in source[at : at + _TOGETHER]:
                    engine.add(prompt, _OUTPUT)
                    engine.step()
                engine.run()


def _rows(engine: StandIn, where: str, judged: bool) -> list[Row]:
    rows = []
    for hook in HOOKS:
        seconds = [s for _, s in engine.times[hook]]
        if not seconds:
            rows.append(Row(f"{hook} p99, {where}", "us", None, note="never called"))
            continue
        bound = FIRST_ASK_US if hook.endswith("first") else BOUND_US
        p99 = stats.percentile(seconds, 99).times(1e6)
        rows.append(Row(f"{hook} p50, {where}", "us", stats.median(seconds).times(1e6)))
        rows.append(Row(f"{hook} p99, {where}", "us", p99, Target("<=", bound) if judged else None))
    return rows


def _of(engine: StandIn, hook: str, tokens: int) -> list[float]:
    return [seconds for length, seconds in engine.times[hook] if length == tokens]


def _slopes(engine: StandIn, size: Size, short: Sequence[float], judged: bool) -> list[Row]:
    """What longer prompts cost in `on_new_request` beyond 4K tokens, by 1K tokens. Nothing else is done with them."""
    from stepwell.bench.standin import prompts

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
        slope = stats.Estimate(
            *((value - base) * 1e6 / further for value in (more.value, more.low, more.high)), count=len(seconds)
        )
        what = f"on_new_request p99, {length >> 10}K tokens: per 1K beyond 4K, {engine.kv.block_tokens}-token blocks"
        rows.append(Row(what, "us", slope, Target("<=", PER_1K_US) if judged else None))
    return rows


@contextlib.contextmanager
def _stopped(home: Path) -> Iterator[None]:
    pid = wells.process(home)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
