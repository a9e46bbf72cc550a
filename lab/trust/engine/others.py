"""Engines whose models keep their KV in another way, or that draft tokens: tiny models with random weights, which only
have to be right.

Their prompts are random, and some go on behind the answer to another one: what an engine has generated is recalled,
too. A well holds all of theirs in host memory, so that is emptied now and then. A control says that no page could be
wrong unnoticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.bench.serving.engines import in_one_process
from lab.rig.tiny import KINDS, VOCABULARY, write_model
from lab.trust.budget import Budget
from lab.trust.engine.control import Noticed, try_each
from lab.trust.engine.prompts import LONGEST, Prompt, answered, draw
from lab.trust.engine.tally import Tally
from lab.trust.engine.trial import Trial
from lab.trust.engine.well import PAGE, TestedWell, tested_well
from lab.trust.report import Row
from stepwell.demo.documents import DemoDocument
from stepwell.demo.engine import EngineConfig, EngineProcess

ANSWERED = "an engine with {}: requests are answered, outputs equal, nothing stays held"
NOTICED = "a control: one wrong page of what such an engine recalls changes its answer"

OUTPUT, MOST_TOKENS, BATCH = 12, 384, 128
"""Tokens of an answer, of a request, and of a step: longer prompts take several."""

_MORE = range(2, 20)
"""Tokens that a prompt has behind the answer to another one."""

_DRAFTED = "vllm:spec_decode_num_"


@dataclass(frozen=True, slots=True)
class Other:
    """`model`: of `lab.rig.tiny`. `pool`: pages, so few that requests are preempted. `block`: tokens, a multiple of
    every group's page. `drafts`: vLLM's speculative_config; a model in it is one of `lab.rig.tiny`. `extra`: further
    arguments of vLLM."""

    name: str
    model: str
    pool: int
    block: int = PAGE
    drafts: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def configs(self, well: TestedWell) -> tuple[EngineConfig, EngineConfig]:
        """A plain engine, which does not draft, in one process; and the one under test, in two: its core goes on when
        nobody asks for anything."""

        def config(pages: int, connector: Mapping[str, Any] | None, more: Mapping[str, Any]) -> EngineConfig:
            extra = {"skip_tokenizer_init": True, "max_num_batched_tokens": BATCH, **self.extra, **more}
            model = well.folder / self.model
            return EngineConfig(model, PAGE, pages, MOST_TOKENS, connector, "float32", well.env(), extra)

        drafts = dict(self.drafts)
        for name in {self.model, drafts.get("model", self.model)}:
            write_model(KINDS[name], well.folder / name)
        if "model" in drafts:
            drafts["model"] = str(well.folder / drafts["model"])
        more = {"distributed_executor_backend": "uni", **({"speculative_config": drafts} if drafts else {})}
        plain, tested = config(3 * self.pool, None, {}), config(self.pool, well.connector(self.block), more)
        return in_one_process(plain), tested


_NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
_NO_KERNEL = {"custom_ops": ["-rotary_embedding"]}  # vLLM's for CPUs takes queries and keys for one tensor

OTHERS = (
    Other("sliding windows", "gemma4", pool=34, block=2 * PAGE),
    Other("recurrent states", "lfm2", pool=20, extra={"compilation_config": _NO_KERNEL}),
    Other("tokens drafted by n-grams", "olmo3 without windows", pool=13, drafts=_NGRAMS),
)


def rows(budget: Budget) -> Iterator[Row]:
    """Raises nothing: what ends one early is a violation, beside what was seen before."""
    noticed = Noticed()
    for other in OTHERS:
        with tested_well(budget.seed) as well:
            yield _tried(other, well, budget, noticed)
    evidence = noticed.unnoticed
    remark = "a case is a stored block that a recall brings, with another one's bytes, alone among right ones"
    yield Row(NOTICED, noticed.cases, len(evidence), budget.seed, "; ".join([remark, *noticed.untried]), evidence[:5])


def _tried(other: Other, well: TestedWell, budget: Budget, noticed: Noticed) -> Row:
    plain, tested = other.configs(well)
    prompts: list[Prompt] = []  # the trial's, as soon as their answers are known
    trial = Trial(well, tested, prompts, budget, other.name)
    tally, drafted = trial.tally, ""
    with trial.counted():
        with EngineProcess(plain, well.folder / "plain.log") as engine:
            trial.begin()  # both start at the same time
            engine.wait_ready()
            prompts += _known(engine, budget.dice(other.name, "prompts"), max(3, budget.of(3, 12)))
        trial.fill()
        try_each(trial.engine, well, [prompts[0], prompts[-1]], other.block, other.name, noticed)
        trial.live(budget.of(30, 1000), budget.of(1, 4))
        drafted = _drafted(trial.engine)
    return _row(other, tally, drafted, budget.seed)


def _known(engine: EngineProcess, dice: random.Random, documents: int) -> list[Prompt]:
    texts = [tuple(dice.randrange(3, VOCABULARY) for _ in range(4 * LONGEST)) for _ in range(documents)]
    drawn = draw([DemoDocument(str(n), len(text), text) for n, text in enumerate(texts)], dice, PAGE)
    first = answered(engine, drawn, OUTPUT)
    return [*first, *answered(engine, [_next_turn(prompt, dice) for prompt in first], OUTPUT)]


def _next_turn(prompt: Prompt, dice: random.Random) -> tuple[int, ...]:
    return (*prompt.tokens, *prompt.answer, *(dice.randrange(3, VOCABULARY) for _ in range(dice.choice(_MORE))))


def _drafted(engine: EngineProcess) -> str:
    counts = {name.removeprefix(_DRAFTED): n for name, n in engine.metrics().items() if name.startswith(_DRAFTED)}
    return ", ".join(f"{n:.0f} {name.replace('_', ' ')}" for name, n in counts.items())


def _row(other: Other, tally: Tally, drafted: str, seed: int) -> Row:
    found = (tally.unstarted, tally.wrong, tally.leaks, tally.left)
    held = f"{tally.aborted.total()} requests aborted, {tally.preempted} preempted, {tally.killed} engines killed"
    return Row(
        ANSWERED.format(other.name),
        tally.answered.total(),
        sum(each.count for each in found),
        seed,
        "; ".join([tally.remark(), held, *([drafted] if drafted else [])]),
        [text for each in found for text in each.first],
    )
