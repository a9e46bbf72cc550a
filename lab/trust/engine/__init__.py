"""Campaign: real vLLM engines serve while everything goes wrong with their well and its disk.

A plain vLLM says what is right (`prompts`). Then engines with the connector, several processes each, are asked
the same in random rounds: alone and together, some aborted at a random moment, with a pool so small that requests are
preempted, and with a host tier that holds less than half of what is asked for, so that much comes from the disk. One
fault after the other befalls the well (`engine_faults`). Whatever happens, a request that is not aborted is answered
with the right tokens, and when nobody asks for anything, nothing is held for anybody. Then the same, shorter, with
engines whose models keep their KV in other ways, and with one that drafts tokens (`others`).

Nothing is tried only where no plain vLLM can be run. Once one has answered, whatever ends the trial early is ours, a
machine that is far too busy included, and counts; what was counted before is told all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from lab.bench.serving.engines import in_one_process
from lab.trust.budget import Budget
from lab.trust.engine import hang, others, said
from lab.trust.engine.prompts import Prompt, answered, draw
from lab.trust.engine.tally import Tally
from lab.trust.engine.trial import Trial
from lab.trust.engine.well import PAGE, TestedWell, tested_well
from lab.trust.report import Row
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.engine import EngineConfig, EngineFailed, EngineProcess
from stepwell.demo.progress import PlainProgress
from stepwell.errors import StepwellError

STARTED = "engines with stepwell start, and recall"
ANSWERED = "an engine's requests are answered, outputs equal"
HELD = "aborts, preemptions and killed engines: nothing stays held"
LEFT = "engines and wells leave no process, file or shared memory"

_POOL, _MOST_TOKENS = 12, 352


def run(budget: Budget) -> Iterator[Row]:
    if find_spec("vllm") is None:
        yield from _untried(budget, "vLLM is not installed")
        return
    with tested_well(budget.seed) as well:
        try:
            config, prompts = _setting(well, budget)
        except (EngineFailed, StepwellError) as error:
            yield from _untried(budget, f"no plain engine could be tried: {error}")
            return
        yield from _tried(well, config, prompts, budget)
    yield from others.rows(budget)


def _tried(well: TestedWell, config: EngineConfig, prompts: list[Prompt], budget: Budget) -> Iterator[Row]:
    trial = Trial(well, config, prompts, budget)
    tally, hung = trial.tally, hang.untried("no engine came so far", budget.seed)
    with trial.counted():
        trial.begin()
        trial.fill()
        trial.live(budget.of(260, 10_000), budget.of(2, 20))
        hung = hang.rows(trial.engine, well, prompts, budget)
    yield from _rows(tally, well, budget)
    yield from hung
    yield said.row(well.folder, prompts, budget.seed)


def _setting(well: TestedWell, budget: Budget) -> tuple[EngineConfig, list[Prompt]]:
    """The engine under test, and what a plain one answers."""
    model = models.prepare(None, PlainProgress())
    documents = library.choose(library.load_encoder(model), max(6, budget.of(6, 24)), PAGE)
    plain = EngineConfig(model, PAGE, 2 * _POOL, _MOST_TOKENS, None, "float32", well.env())
    with EngineProcess.start(in_one_process(plain), well.folder / "plain.log") as engine:
        prompts = answered(engine, draw(documents, budget.dice("engine", "prompts"), PAGE))
    budget.tell(f"engine: {len(prompts)} prompts")
    return EngineConfig(model, PAGE, _POOL, _MOST_TOKENS, well.connector(), "float32", well.env()), prompts


def _rows(tally: Tally, well: TestedWell, budget: Budget) -> list[Row]:
    seed, missing = budget.seed, [f"faults of the disk itself could not be tried: {well.why}"] if well.why else []
    held = (
        f"looked {tally.looks} times, while nobody asked for anything, for pins, leases, slots and sessions; "
        f"{tally.aborted.total()} requests aborted, {tally.preempted} preempted, {tally.resets} prefix caches reset, "
        f"{tally.killed} engines killed while they served"
    )
    started = f"a case is a start: the first, one after each of {tally.killed} kills, and after each failure"
    return [
        Row(STARTED, tally.starts, tally.unstarted.count, seed, started, tally.unstarted.first),
        Row(
            ANSWERED,
            tally.answered.total(),
            tally.wrong.count,
            seed,
            "; ".join([tally.remark(), *missing]),
            tally.wrong.first,
        ),
        Row(
            HELD,
            tally.aborted.total() + tally.preempted + tally.killed,
            tally.leaks.count,
            seed,
            held,
            tally.leaks.first,
        ),
        Row(LEFT, tally.ended_engines, tally.left.count, seed, "a case is an engine that ended", tally.left.first),
    ]


def _untried(budget: Budget, why: str) -> list[Row]:
    return [Row(promise, 0, 0, budget.seed, why) for promise in (STARTED, ANSWERED, HELD, LEFT, said.TOLD)]
