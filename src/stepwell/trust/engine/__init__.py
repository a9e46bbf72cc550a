"""Campaign: real vLLM engines serve while everything goes wrong with their well and its disk.

A plain vLLM says what is right (`prompts`). Then engines with the connector, several processes each, are asked
the same in random rounds: alone and together, some aborted at a random moment, with a pool so small that requests are
preempted, and with a host tier that holds less than half of what is asked for, so that much comes from the disk. One
fault after the other befalls the well (`engine_faults`). Whatever happens, a request that is not aborted is answered
with the right tokens, and when nobody asks for anything, nothing is held for anybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib.util import find_spec

from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.engine import Engine, EngineConfig, EngineFailed
from stepwell.demo.progress import PlainProgress
from stepwell.errors import StepwellError
from stepwell.trust.budget import Budget
from stepwell.trust.engine import hang, said
from stepwell.trust.engine.prompts import Prompt, answered, draw
from stepwell.trust.engine.tally import Tally
from stepwell.trust.engine.trial import Trial
from stepwell.trust.engine.well import TestedWell, tested_well
from stepwell.trust.report import Row

ANSWERED = "an engine's requests are answered, outputs equal"
HELD = "aborts, preemptions and killed engines: nothing stays held"
LEFT = "engines and wells leave no process, file or shared memory"

_PAGE, _POOL, _MOST_TOKENS = 32, 12, 352


def run(budget: Budget) -> Iterable[Row]:
    if find_spec("vllm") is None:
        return _untried(budget, "vLLM is not installed")
    try:
        with tested_well(budget.seed) as well:
            return _tried(well, budget)
    except (EngineFailed, StepwellError, TimeoutError) as error:
        return _untried(budget, f"no engine could be started: {error}")


def _tried(well: TestedWell, budget: Budget) -> list[Row]:
    config, prompts = _setting(well, budget)
    requests, lives = budget.of(300, 10_000), budget.of(2, 20)
    trial = Trial(well, config, prompts, budget)
    hung: list[Row] = []
    with contextlib.closing(trial):
        try:
            trial.fill()
            for life in range(lives):
                if life:
                    trial.kill_engine()
                trial.serve((requests - trial.tally.requests) // (lives - life))
            hung = hang.rows(trial.engine, well, prompts, budget)
        except EngineFailed as error:
            trial.tally.wrong.add(f"an engine failed, and the rest was not tried: {error}")
        except TimeoutError as error:  # of a new engine, on a machine that is far too busy
            trial.tally.ended = str(error)
    return [*_rows(trial.tally, well, budget), *hung, said.row(well.folder, prompts, budget.seed)]


def _setting(well: TestedWell, budget: Budget) -> tuple[EngineConfig, list[Prompt]]:
    """The engine under test, and what a plain one answers."""
    model = models.prepare(None, PlainProgress())
    documents = library.choose(library.load_encoder(model), max(6, budget.of(6, 24)), _PAGE)
    plain = EngineConfig(model, _PAGE, 2 * _POOL, _MOST_TOKENS, None, "float32", well.env())
    with Engine.start(plain, well.folder / "plain.log") as engine:
        prompts = answered(engine, draw(documents, budget.dice("engine", "prompts"), _PAGE))
    budget.tell(f"engine: {len(prompts)} prompts")
    return EngineConfig(model, _PAGE, _POOL, _MOST_TOKENS, well.connector(), "float32", well.env()), prompts


def _rows(tally: Tally, well: TestedWell, budget: Budget) -> list[Row]:
    seed, missing = budget.seed, [f"faults of the disk itself could not be tried: {well.why}"] if well.why else []
    held = (
        f"looked {tally.looks} times, while nobody asked for anything, for pins, leases, slots and sessions; "
        f"{tally.aborted.total()} requests aborted, {tally.preempted} preempted, {tally.resets} prefix caches reset, "
        f"{tally.killed} engines killed while they served"
    )
    return [
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
        Row(LEFT, tally.killed + 1, tally.left.count, seed, "a case is an engine that ended", tally.left.first),
    ]


def _untried(budget: Budget, why: str) -> list[Row]:
    return [Row(promise, 0, 0, budget.seed, why) for promise in (ANSWERED, HELD, LEFT, said.TOLD)]
