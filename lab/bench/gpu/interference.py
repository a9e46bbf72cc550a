"""What recalls and spills beside it cost a running decode: times between its tokens, against none; docs/benchmarks.md.

A batch decodes the same token for ever, in a CUDA graph, with the next step handed over before the last one's tokens
are read. Beside it requests for which nothing is computed are recalled, spilled, or both, through both halves and a
real well. All four are taken in turn, several times, so that a slow minute slows all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench import wells
from lab.bench.gpu import card
from lab.bench.gpu.engine.compute import Steady
from lab.bench.gpu.engine.decoder import Decoder
from lab.bench.gpu.engine.halves import Halves, open_halves
from lab.bench.gpu.engine.kv import Kv, Layout
from lab.bench.gpu.engine.model import Llama
from lab.bench.gpu.engine.serving import Engine, Live
from lab.bench.gpu.recalls import spill
from lab.bench.gpu.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.engines.common.steps import MIN_BYTES

NONE, RECALLS, SPILLS, BOTH = "nothing", "recalls", "spills", "both"
BESIDE = (NONE, RECALLS, SPILLS, BOTH)
SLOWED = Target("<=", 1.05)
GIB = 1 << 30
_SEED = 11


@dataclass(frozen=True, slots=True)
class Size:
    """`batch` requests with `context` tokens each decode; `tokens` are recalled or spilled by a request. A phase has
    `steps` steps, after `warm_up`; all phases are taken `rounds` times."""

    page: int
    batch: int
    context: int
    tokens: int
    host: int
    steps: int
    rounds: int
    warm_up: int = 8


FULL = Size(16, 16, 1024, 16384, 12 * GIB, 150, 5)
QUICK = Size(16, 16, 1024, 8192, 6 * GIB, 40, 2)
TINY = Size(16, 2, 64, 512, 64 << 20, 40, 2, 2)


@dataclass(slots=True)
class Phase:
    """Seconds between tokens, and what was copied meanwhile in how many seconds."""

    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    recalled: int = 0
    spilled: int = 0
    joules: float | None = 0.0


class Beside:
    """Keeps two requests going that recall one and the same prompt, and one that spills a new one."""

    def __init__(self, engine: Engine, size: Size) -> None:
        self._engine, self._size = engine, size
        self._random = random.Random(_SEED)
        self._prompt = self._new(size.tokens)
        self._recalls: list[Live] = []
        self._spills: list[Live] = []

    def _new(self, count: int) -> list[int]:
        return [self._random.randrange(32_000) for _ in range(count)]

    def spill_prompt(self) -> None:
        """Until all that will be recalled lies in the well. Raises TimeoutError."""
        shape = self._engine.kv.shape
        spill(self._engine, self._prompt, shape.page_bytes * self._size.tokens // shape.page, dry=True)

    def step(self, what: str) -> None:
        self._recalls = [live for live in self._recalls if not live.done]
        self._spills = [live for live in self._spills if not live.done]
        if what in (RECALLS, BOTH) and len(self._recalls) < 2:
            self._recalls.append(self._engine.add(self._prompt, 0, dry=True))
        if what in (SPILLS, BOTH) and not self._spills:
            self._spills.append(self._engine.add(self._new(self._size.tokens), 1, dry=True, recall="never"))
        self._engine.step()

    def end(self) -> None:
        """Nothing goes on beside the decode any more."""
        for live in (*self._recalls, *self._spills):
            self._engine.abort(live)
        self._engine.run()


def run(stage: Stage) -> Result:
    size = TINY if stage.tiny else QUICK if stage.quick else FULL
    phases = {what: Phase() for what in BESIDE}
    remarks: list[str] = []
    taken = 0
    if not stage.over:
        with wells.well(size.host) as home:
            taken = _measure(stage, size, home, phases, remarks)
    gaps = min(len(phase.gaps) for phase in phases.values())
    return Result("gpu-interference", _rows(phases), {"rounds": taken, "gaps": gaps}, remarks)


def _measure(stage: Stage, size: Size, home: Path, phases: dict[str, Phase], remarks: list[str]) -> int:
    """How many rounds were taken."""
    own = size.batch * -(-size.context // size.page)
    pages = own + 1 + 4 * -(-size.tokens // size.page)
    kv = Kv.make(stage.model.kv(pages, size.page, stage.dtype), Layout.BLHNC, stage.device)
    decoder = Decoder(Llama(stage.model, kv.layers), size.batch, own // size.batch)
    with open_halves(home, kv, block_tokens=stage.block_tokens) as halves:
        each = own // size.batch
        tables = [range(1 + n * each, 1 + (n + 1) * each) for n in range(size.batch)]
        budget = max(size.page, MIN_BYTES // kv.shape.page_bytes * size.page)
        engine = Engine(kv, halves, Steady(decoder, tables, size.context), ahead=True, budget=budget)
        engine.pool.take(own)  # those of the tables
        halves.wait_ready()
        halves.grow(size.host * 3 // 4)
        beside = Beside(engine, size)
        beside.spill_prompt()
        graph = "a CUDA graph" if decoder.graph is not None else "no graph: this is no GPU"
        remarks += [
            f"{size.batch} requests of {size.context} tokens decode, in {graph}; {size.tokens} tokens a recall",
            f"a step spills at most {MIN_BYTES >> 20} MiB, as in the product where little is computed",
        ]
        for taken in range(size.rounds):
            for what in BESIDE:
                if stage.over and taken:
                    return taken
                _phase(engine, halves, size, what, beside, phases[what])
        if halves.told:
            remarks.append("trouble was told: " + "; ".join(halves.told[:3]))
    return size.rounds


def _phase(engine: Engine, halves: Halves, size: Size, what: str, beside: Beside, phase: Phase) -> None:
    for _ in range(size.warm_up):
        beside.step(what)
    joules, recalled, spilled = card.joules(), engine.recalled_bytes, engine.spilled_bytes
    began = last = engine.told_s
    for _ in range(size.steps):
        beside.step(what)
        if engine.told_s > last:
            phase.gaps.append(engine.told_s - last)
            last = engine.told_s
    phase.seconds += last - began
    phase.recalled += engine.recalled_bytes - recalled
    phase.spilled += engine.spilled_bytes - spilled
    after = card.joules()
    known = joules is not None and after is not None and phase.joules is not None
    phase.joules = phase.joules + after - joules if known else None  # type: ignore[operator]
    beside.end()


def _rows(phases: dict[str, Phase]) -> list[Row]:
    plain = phases[NONE].gaps
    rows: list[Row] = []
    for what in BESIDE[1:]:
        gaps = phases[what].gaps
        for percent in (50, 99):
            name = f"time between tokens beside {what} over that beside nothing, p{percent}"
            if not gaps or not plain:
                rows.append(Row(name, "", None, SLOWED, SKIPPED))
                continue
            found = stats.ratio_of_percentiles(gaps, plain, percent) if _went_on(phases[what], what) else None
            rows.append(Row(name, "", found, SLOWED, _copied(phases[what])))
    for what in BESIDE:
        if gaps := phases[what].gaps:
            for percent in (50, 99):
                found = stats.percentile(gaps, percent).times(1e3)
                rows.append(Row(f"  time between tokens beside {what}, p{percent}", "ms", found))
            rows.append(Row(f"  time between tokens beside {what}, mean", "ms", stats.mean(gaps).times(1e3)))
            rows.append(_energy(what, phases[what]))
    return rows


def _went_on(phase: Phase, what: str) -> bool:
    """A decode beside which nothing was copied shows nothing."""
    return (what == SPILLS or phase.recalled > 0) and (what == RECALLS or phase.spilled > 0)


def _copied(phase: Phase) -> str:
    recalled, spilled = (moved / max(phase.seconds, 1e-9) / 1e9 for moved in (phase.recalled, phase.spilled))
    return f"recalled {recalled:.3g} GB/s, spilled {spilled:.3g} GB/s"


def _energy(what: str, phase: Phase) -> Row:
    name = f"  the GPU's power beside {what}"
    if phase.joules is None or not phase.seconds:
        return Row(name, "W", None, None, "no NVML here, or the GPU does not count its energy")
    watts = phase.joules / phase.seconds
    return Row(name, "W", stats.Estimate(watts, watts, watts, 1))
