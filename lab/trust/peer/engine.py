"""A real engine above vLLM's own filesystem tier, and one above stepwell's in its place, on a CPU through
`benchmarks/peers`: the same prompts, and the same harm between the storing of their blocks and the recall.

What vLLM's own tier makes of it is a comparison. Of ours each answer is to be right and in time, and the harm is to be
met, or nothing was tried. What is right are the answers of the first engine while nothing is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

from lab.bench.compared import systems
from lab.bench.compared.systems import VLLM_FS
from lab.trust.budget import Budget
from lab.trust.engine.prompts import OUTPUT, TAILS, Prompt, answered, draw
from lab.trust.engine.well import TestedWell, tested_well
from lab.trust.peer.harm import HANG, HARMS, Harm
from lab.trust.peer.seen import Hung, Seen
from lab.trust.peer.subjects import PAGE, FsTier, Subject, WellTier
from lab.trust.report import Row, ended_by
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.engine import EngineFailed
from stepwell.demo.progress import PlainProgress
from stepwell.demo.wire import Question
from stepwell.errors import StepwellError

_TOGETHER, _STRIKES_WITHIN_S = 3, 0.4


def rows(budget: Budget, version: str) -> list[Row]:
    """For each harm ours, then vLLM's."""
    trials = (Trial(WellTier, budget), Trial(FsTier, budget))
    try:
        systems.check([VLLM_FS])
        with tested_well(budget.seed) as place:
            _tried(place, *trials, budget)
    except (EngineFailed, StepwellError) as error:
        for seen in (seen for trial in trials for seen in trial.seen.values()):
            seen.why = str(error)
    told = f"{version}, on a CPU by benchmarks/peers, float32"
    tried = [(trial.seen[harm.name], trial.kind, harm) for harm in HARMS for trial in trials if harm.name in trial.seen]
    return [seen.row(kind, harm, budget.seed, f"{told}: ") for seen, kind, harm in tried]


def _tried(place: TestedWell, ours: Trial, theirs: Trial, budget: Budget) -> None:
    """Raises EngineFailed where no engine runs above vLLM's tier."""
    model = models.prepare(None, PlainProgress())
    documents = library.choose(library.load_encoder(model), max(6, budget.of(6, 24)), PAGE)
    drawn = draw(documents, budget.dice("peer", "prompts"), PAGE)[::TAILS]  # none begins like another one
    with closing(FsTier(place, model)) as files:
        files.start()
        prompts = answered(files.engine, drawn)  # and stored
        theirs.run(files, prompts)
    with closing(WellTier(place, model)) as well:
        ours.run(well, prompts)


class Trial:
    """`seen` by the names of harms. One that breaks down costs the rest."""

    def __init__(self, kind: type[Subject], budget: Budget) -> None:
        self.kind, self._budget = kind, budget
        self.seen = {harm.name: Hung() if harm is HANG else Seen() for harm in HARMS if kind.ours or not harm.ours}

    def run(self, subject: Subject, prompts: Sequence[Prompt]) -> None:
        ended = ""
        for harm in (harm for harm in HARMS if harm.name in self.seen):
            seen = self.seen[harm.name]
            no_disk = subject.place.why if harm.rules else ""
            seen.why = ended or no_disk or ("no time was left" if self._budget.over else "")
            if seen.why:
                continue
            try:
                if isinstance(seen, Hung):
                    for number in range(self._budget.of(2 if self.kind.ours else 1, 10)):
                        self._hang(subject, prompts, f"hang {number}", seen)
                else:
                    self._pass(subject, harm, prompts, seen)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told and counted
                seen.fail(ended_by(error))
                ended = f"the trial had ended: {harm.name}"

    def _pass(self, subject: Subject, harm: Harm, prompts: Sequence[Prompt], seen: Seen) -> None:
        """Everything is asked for again."""
        dice, struck = self._budget.dice("peer", harm.name), subject.place.struck["killed"]
        subject.befall(harm, dice)
        before = subject.blocks()
        width = len(prompts) // _TOGETHER if harm.amid else len(prompts)
        for batch in (prompts[at::width] for at in range(width)):
            if harm.amid:
                subject.settle()
            subject.engine.reset_prefix_cache()
            with _within(dice.uniform(0, _STRIKES_WITHIN_S), subject.kill) if harm.amid else nullcontext():
                answers = subject.engine.ask_all([_question(prompt) for prompt in batch])
            for prompt, answer in zip(batch, answers, strict=True):
                seen.take(prompt, answer)
        hits = subject.heal()
        seen.struck = hits if harm.rules else subject.place.struck["killed"] - struck
        subject.mend()
        seen.blocks = subject.blocks() - before
        if held := subject.held():
            seen.fail(f"nobody asks for anything, and there is {held}")

    def _hang(self, subject: Subject, prompts: Sequence[Prompt], salt: str, seen: Hung) -> None:
        """One read hangs, if any is needed: vLLM's host memory has others since the prompt was asked for."""
        engine, faulty, (*others, prompt) = subject.engine, subject.place.faulty, prompts
        assert faulty is not None
        missed, *_ = engine.ask_all([Question(list(prompt.tokens), 1, salt)])
        for other in others:
            engine.ask(list(other.tokens), 1)
        subject.settle()
        engine.reset_prefix_cache()
        faulty.set(*HANG.rules)
        answer, *_ = engine.ask_all([_question(prompt)])
        if subject.heal():
            seen.take(prompt, answer)
            computed = 1 - answer.cached_tokens / answer.prompt_tokens
            seen.later_s.append(answer.ttft_s - missed.ttft_s * computed)
            seen.missed_s.append(missed.ttft_s)
        subject.kill()
        subject.mend()


@contextmanager
def _within(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """It is done so many seconds after the beginning."""
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _question(prompt: Prompt) -> Question:
    return Question(list(prompt.tokens), OUTPUT, sampling={"logprobs": 0})
