"""Recall or recompute: a disk tier at five speeds around break-even, one and four prompts at a time, three modes.

One engine with stepwell, whose well reads no faster than it is told (`bench.throttle`), and a plain one, halted
while the other is measured. Break-even is measured first: the bytes of the prompts over the plain engine's seconds to
their first tokens. The prompts lie on disk; before each question the engine forgets them and host memory is cleared.
At each speed the modes take turns with each prompt (or four), in an order that changes, so that what else the machine
does meets all of them. A few questions after each change of speed are not counted, and are asked in the default mode
alone: what it knows, it has found out by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.bench import processes
from lab.bench.report import Result, Row, Target
from lab.bench.serving import engines
from lab.bench.serving.engines import Bench, Shape
from lab.bench.wells import PATIENCE_S
from lab.rig.well import eventually
from stepwell.client import control
from stepwell.demo import documents as library
from stepwell.demo.documents import Encode
from stepwell.demo.engine import EngineProcess
from stepwell.demo.results import stats
from stepwell.demo.well import DemoWell
from stepwell.demo.wire import Question

FACTORS = (0.25, 1.0, 2.0, 4.0, 16.0)
"""Tier speeds as multiples of break-even."""

TOGETHER = (1, 4)
MODES = ("auto", "always", "never")
PLAIN = "plain"
EVERY = (*MODES, PLAIN)
OVER_PLAIN, OVER_BETTER = 1.05, 1.10
PAGE, TOKENS, OUTPUT = 32, 640, 2
_HOST, _DISK = 512 << 20, 2 << 30
_SETTLE_S = 20.0
"""At least a probe's pause and a few more: how long the default mode may learn a new speed, unmeasured."""


@dataclass(frozen=True, slots=True)
class Size:
    prompts: int
    repetitions: int
    factors: tuple[float, ...] = FACTORS
    settle_s: float = _SETTLE_S


FULL, QUICK = Size(4, 3), Size(4, 1, (0.25, 16.0), 6.0)

Samples = dict[tuple[float, int, str], list[float]]
"""Seconds to first token, by speed, questions at a time and mode."""


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    with _bench() as (bench, speed):
        shape = Shape(PAGE, (size.prompts + 1) * (TOKENS // PAGE + 2), TOKENS + 2 * PAGE)
        with bench.engine("stepwell", shape) as ours, bench.engine("plain", shape, stepwell=False) as plain:
            return _measured(bench, ours, plain, speed, size)


@contextmanager
def _bench() -> Iterator[tuple[Bench, Path]]:
    """A place whose well runs already, slowed by a file."""
    with engines.bench(_HOST, _DISK) as bench:
        speed = bench.folder / "speed"
        speed.write_text("0")
        command = [sys.executable, "-m", "lab.bench.serving.throttle", bench.well.home, str(_HOST)]
        command += [f"{bench.well.disk}:{_DISK}", speed]
        with (
            (bench.folder / "well.log").open("ab") as log,
            subprocess.Popen(
                list(map(str, command)), stdout=subprocess.PIPE, stderr=log, env={**os.environ}, text=True
            ) as well,
        ):
            assert well.stdout is not None
            if "ready" not in well.stdout.readline():
                raise TimeoutError(f"the slowed well did not start: see {bench.folder / 'well.log'}")
            try:
                yield replace(bench, well=_Joined(bench.well.home, _HOST, _DISK)), speed
            finally:
                well.terminate()


class _Joined(DemoWell):
    """A well that runs already; without canaries, which compute what could be recalled."""

    def connector(self) -> dict[str, Any]:
        extra = {"home": str(self.home), "canary": 0}
        return {**super().connector(), "kv_connector_extra_config": extra}


def _measured(bench: Bench, ours: EngineProcess, plain: EngineProcess, speed: Path, size: Size) -> Result:
    prompts = _prompts(bench.encode, size.prompts)
    before = control.stats(bench.well.home)
    for prompt in prompts:
        ours.ask(prompt, OUTPUT)
    bench.well.wait_until_written()
    spilled = int(control.stats(bench.well.home)["disk_spilled_bytes"]) - int(before.get("disk_spilled_bytes", 0))
    alone = [_plain(plain, ours, [prompt])[0] for prompt in prompts * 2]
    break_even = spilled / len(prompts) / fmean(alone)
    samples: Samples = {}
    steps = len(size.factors) * size.repetitions * len(TOGETHER)
    with bench.progress.steps("modes in turn at each speed", steps) as step:
        for factor in size.factors:
            speed.write_text(str(factor * break_even))
            _learn(bench, ours, plain, prompts, size.settle_s)
            for repetition in range(size.repetitions):
                for together in TOGETHER:
                    for number, some in enumerate(_groups(prompts, together)):
                        for turn in range(len(EVERY)):
                            mode = EVERY[(turn + repetition + number) % len(EVERY)]
                            found = samples.setdefault((factor, together, mode), [])
                            found += _ask(bench, ours, plain, some, mode)
                    step(f"{factor:g} x, {together} at a time")
    decided = {name: int(value) for name, value in control.stats(bench.well.home).items() if name.startswith("decided")}
    return Result("decide", rows(samples, size.factors, break_even), decided, [
        f"{len(prompts)} prompts of {TOKENS} tokens, page {PAGE}, {size.repetitions} repetitions; break-even "
        f"{break_even / 1e6:.1f} MB/s; `always` is kept to the limits of waiting, too",
    ])  # fmt: skip


def rows(samples: Samples, factors: Sequence[float], break_even: float) -> list[Row]:
    """Two targets for each point, on means; and what they are made of."""
    found: list[Row] = []
    for factor in factors:
        for together in TOGETHER:
            of = {mode: samples.get((factor, together, mode), []) for mode in EVERY}
            where = f"{factor:g} x break-even ({factor * break_even / 1e6:.0f} MB/s), {together} at a time"
            if not all(of.values()):
                found.append(Row(where, "", None, Target("<=", OVER_PLAIN), "nothing was measured"))
                continue
            better = min(("always", "never"), key=lambda mode: fmean(of[mode]))
            plain, other = (stats.ratio_of_means(of["auto"], of[mode]) for mode in (PLAIN, better))
            found.append(Row(f"{where}: auto over plain vLLM", "", plain, Target("<=", OVER_PLAIN)))
            found.append(Row(f"  auto over {better}, the better mode", "", other, Target("<=", OVER_BETTER)))
            found += [Row(f"  mean TTFT, {mode}", "s", stats.mean(of[mode])) for mode in of]
    return found


def _ask(bench: Bench, ours: EngineProcess, plain: EngineProcess, prompts: list[list[int]], mode: str) -> list[float]:
    return _plain(plain, ours, prompts) if mode == PLAIN else _ours(bench, ours, plain, prompts, mode)


def _plain(plain: EngineProcess, ours: EngineProcess, prompts: list[list[int]]) -> list[float]:
    plain.reset_prefix_cache()
    with processes.halted(ours.pids()):
        return [answer.ttft_s for answer in plain.ask_all([Question(prompt, OUTPUT) for prompt in prompts])]


def _ours(bench: Bench, ours: EngineProcess, plain: EngineProcess, prompts: list[list[int]], mode: str) -> list[float]:
    _forget(bench, ours)
    sampling = {"extra_args": {"kv_transfer_params": {"stepwell": {"recall": mode}}}}
    with processes.halted(plain.pids()):
        return [a.ttft_s for a in ours.ask_all([Question(prompt, OUTPUT, sampling=sampling) for prompt in prompts])]


def _forget(bench: Bench, ours: EngineProcess) -> None:
    """The prompts are on disk and nowhere else."""
    eventually(ours.reset_prefix_cache, "the engine forgets", PATIENCE_S)
    bench.well.wait_until_written()
    control.clear(bench.well.home, ["host"])


def _learn(bench: Bench, ours: EngineProcess, plain: EngineProcess, prompts: list[list[int]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for prompt in prompts:
            _ours(bench, ours, plain, [prompt], "auto")


def _prompts(encode: Encode, count: int) -> list[list[int]]:
    """Beginnings of the standard library's sources; all differ from their first block on."""
    found = []
    for name, text in library.library_texts():
        tokens = encode(f"{name}.py\n\n{text[:12_000]}")
        if len(tokens) >= TOKENS:
            found.append(tokens[: TOKENS - 7])
        if len(found) == count:
            return found
    raise TimeoutError("too few sources for prompts")


def _groups(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[at : at + size] for at in range(0, len(prompts), size)]
