"""A workload without reuse: what spilling every prompt costs, where nothing is ever recalled.

Two engines live side by side, one with stepwell and one plain, and get the same prompts, all of them different from
their first token on; which one is asked first alternates. The other one is halted meanwhile (SIGSTOP), since vLLM's
processes spin while they wait. Time is the request's wall time, and the CPU time of all processes of the engine and of
the well, read a moment after the answer, when spilling has ended, to disk too where there is one. The ratio with the
narrower interval is judged. Once with host memory alone, once with a disk tier behind it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lab.bench import processes
from lab.bench.report import Result, Row, Target
from lab.bench.serving import engines
from lab.bench.serving.engines import Shape
from stepwell.client import control
from stepwell.demo.documents import Encode, library_texts
from stepwell.demo.engine import EngineProcess
from stepwell.demo.results import stats
from stepwell.demo.results.measure import Ratio, ratio
from stepwell.demo.well import DemoWell

PAGE = 128
SHORTEST, LONGEST, OUTPUT = 1024, 2048, 16
_HOST, _DISK = 192 << 20, 2 << 30
_PAUSE_S = 0.05  # for what is done behind the last token
_WARM_UP_LIMIT = 40
_SEED = 11


@dataclass(frozen=True, slots=True)
class Size:
    pairs: int


FULL, QUICK = Size(24), Size(4)


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    found: list[Row] = []
    counts: dict[str, int] = {}
    for tiers, disk_bytes in (("host", 0), ("host and disk", _DISK)):
        pairs, counted = _measured(disk_bytes, size)
        found += rows(tiers, pairs)
        counts |= {f"{tiers}: {name}": count for name, count in counted.items()}
    remarks = [
        f"prompts of {SHORTEST} to {LONGEST} tokens, {OUTPUT} of output, engine page {PAGE}, one request at a time; "
        "the arena is full, so that every spill evicts"
    ]
    return Result("noreuse", found, counts, remarks)


def _measured(disk_bytes: int, size: Size) -> tuple[list[tuple[Cost, Cost]], dict[str, int]]:
    with engines.bench(_HOST, disk_bytes) as bench:
        shape = Shape(PAGE, 3 * LONGEST // PAGE, LONGEST + PAGE)
        with bench.engine("stepwell", shape) as ours, bench.engine("plain", shape, stepwell=False) as plain:
            prompts = _prompts(bench.encode)
            before = control.stats(bench.well.home)
            with bench.progress.waiting("filling the arena"):
                warm_ups = _populate(ours, plain, bench.well, prompts)
            with bench.progress.steps("prompts to both engines", size.pairs) as step:
                pairs = _pairs(ours, plain, bench.well, prompts, size, step)
            after = control.stats(bench.well.home)
    spilled = ("spilled_blocks", "recalled_blocks", "disk_spilled_blocks")
    grown: dict[str, int] = {name: int(after[name]) - int(before[name]) for name in spilled if name in after}
    return pairs, {"pairs": len(pairs), "dropped": size.pairs - len(pairs), "warm_up_requests": warm_ups, **grown}


def rows(tiers: str, pairs: Sequence[tuple[Cost, Cost]]) -> list[Row]:
    """`pairs` are (with stepwell, plain). The target is on the steadier ratio."""
    if not pairs:
        return [Row(f"{tiers}: time per request over plain vLLM's", "", None, Target("<=", 1.02), "no pair was left")]
    cpu, wall = ratio([a.cpu_s / b.cpu_s for a, b in pairs]), ratio([a.wall_s / b.wall_s for a, b in pairs])
    assert cpu is not None and wall is not None
    steadier = cpu if cpu.high - cpu.low <= wall.high - wall.low else wall
    found = []
    for name, value in (("CPU seconds", cpu), ("wall seconds", wall)):
        judged = value is steadier
        found.append(
            Row(
                f"{tiers}: {name} per request over plain vLLM's",
                "",
                _estimate(value),
                Target("<=", 1.02) if judged else None,
                "the steadier one, judged" if judged else "",
            )
        )
    for name, which in (("with stepwell", 0), ("plain", 1)):
        found.append(Row(f"  CPU, {name}", "s", stats.median([pair[which].cpu_s for pair in pairs])))
        found.append(Row(f"  wall, {name}", "s", stats.median([pair[which].wall_s for pair in pairs])))
    return found


def _estimate(value: Ratio) -> stats.Estimate:
    return stats.Estimate(value.median, value.low, value.high, value.count)


def _pairs(
    ours: EngineProcess,
    plain: EngineProcess,
    well: DemoWell,
    prompts: Iterator[list[int]],
    size: Size,
    step: Callable[[str], None],
) -> list[tuple[Cost, Cost]]:
    pairs: list[tuple[Cost, Cost]] = []
    for number in range(size.pairs):
        prompt = next(prompts)
        found = {}
        for engine, other in [(ours, plain), (plain, ours)][:: 1 if number % 2 else -1]:
            found[engine] = _ask(engine, other, prompt, well if engine is ours else None)
        a, b = found[ours], found[plain]
        if a is not None and b is not None:
            pairs.append((a, b))
        step(f"{len(prompt)} tokens")
    return pairs


def _ask(engine: EngineProcess, other: EngineProcess, prompt: list[int], well: DemoWell | None) -> Cost | None:
    """What the request costs this engine and its well. None: something was cached, or a process came or went."""
    beside = [int(control.stats(well.home)["pid"])] if well is not None else []
    with processes.halted(other.pids()):
        time.sleep(_PAUSE_S)
        before = processes.cpu_seconds([*engine.pids(), *beside])
        answer = engine.ask(prompt, OUTPUT)
        time.sleep(_PAUSE_S)
        if well is not None and well.disk_bytes:
            well.wait_until_written()
        cpu_s = processes.spent_between(before, processes.cpu_seconds([*engine.pids(), *beside]))
    return None if cpu_s is None or answer.cached_tokens else Cost(answer.total_s, cpu_s)


def _populate(ours: EngineProcess, plain: EngineProcess, well: DemoWell, prompts: Iterator[list[int]]) -> int:
    """Asks both until the arena is full of blocks: all its slabs are populated, and every further spill evicts."""
    for number in range(_WARM_UP_LIMIT):
        prompt = next(prompts)
        for engine, other in ((ours, plain), (plain, ours)):
            _ask(engine, other, prompt, None)
        if int(control.stats(well.home).get("dropped_evicted", 0)):
            return number + 1
    raise TimeoutError(f"the arena is not full after {_WARM_UP_LIMIT} prompts")


def _prompts(encode: Encode) -> Iterator[list[int]]:
    """Pieces of the standard library's sources; a number in front makes each one new from its first token on."""
    source = random.Random(_SEED)
    tokens: list[int] = []
    for _, text in library_texts():
        tokens += encode(text[:40_000])
        if len(tokens) > 400_000:
            break
    for number in range(1_000_000):
        length = source.randrange(SHORTEST, LONGEST)
        at = source.randrange(len(tokens) - length)
        head = encode(f"{source.randrange(10**9)}, {number}: ")
        yield [*head, *tokens[at : at + length - len(head)]]
