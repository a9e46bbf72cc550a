"""How many drafts are accepted of a drafter that keeps KV of its own: of prompts that are computed, hit in the engine's
own cache, recalled, and recalled without what the drafter keeps of them.

A small real model, one request at a time, for each drafter two engines above one well: the second one, with zeros in
place of the drafter's KV, recalls what the first one has spilled. Prompts end where a document begins again, so that
the answer quotes what only the prompt tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.report import Result, Row, Target
from lab.bench.serving.engines import Bench, bench, in_one_process, warm_up
from lab.bench.speculation.checkpoints import EPOCHS, NOISE, eagle_head, noisy
from stepwell.demo import documents
from stepwell.demo import model as models
from stepwell.demo.documents import DemoDocument
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.results import stats
from stepwell.demo.wire import Answer, Question

PAGE, ANSWER, ATTEMPTS = 32, 48, 5
ASKED, TAUGHT = (480, 40), (256, 224)
"""Tokens of a document, and of its beginning once more: of prompts, and of what the head learns from."""

DRAFTS = {"draft_model": 3, "eagle": 1}  # tokens at a time
NAMES = {"draft_model": "a draft model", "eagle": "an EAGLE head"}
COLD, HIT, RECALLED, WITHOUT = "computed", "engine hit", "recalled", "recalled without the drafter's KV"
WAYS = (COLD, HIT, RECALLED, WITHOUT)
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True, slots=True)
class Drafted:
    """An answer, and of it: how often tokens were drafted, how many, and how many of them were accepted."""

    answer: Answer
    times: float
    drafted: float
    accepted: float

    @property
    def counts(self) -> tuple[float, float, float]:
        return self.times, self.drafted, self.accepted


Found = dict[str, list[Drafted]]


def run(quick: bool) -> Result:
    prompts, epochs = (2, 1) if quick else (12, EPOCHS)
    rows: list[Row] = []
    with bench(1 << 30, settings={"block_tokens": PAGE, "canary": 0}) as place:
        chosen = documents.choose(place.encode, prompts, PAGE)
        asked = [_twice(document, ASKED) for document in chosen]
        taught = [_twice(document, TAUGHT) for document in chosen]
        cache = models.cache_folder()
        makers: dict[str, Callable[[], Path]] = {
            "draft_model": lambda: noisy(place.model, place.folder / "noisy"),
            "eagle": lambda: eagle_head(place.model, cache, taught, epochs),
        }
        for method, make in makers.items():
            with place.progress.waiting(f"making the drafter: {NAMES[method]}"):
                drafter = make()
            drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFTS[method]}
            rows += _rows(NAMES[method], _found(place, method, drafts, asked))
    remarks = [
        f"SmolLM2-135M in bf16, {prompts} prompts of {ASKED[0]} tokens of a document and {ASKED[1]} of its beginning "
        f"again, greedy answers of {ANSWER} tokens, pages and blocks of {PAGE}; the draft model is the model with "
        f"noise in its matrices ({NOISE:g} of their deviation) and drafts {DRAFTS['draft_model']} tokens at a time, "
        f"the EAGLE head learned these documents in {epochs} passes and drafts {DRAFTS['eagle']}"
    ]
    return Result("drafters", rows, {"prompts": prompts}, remarks)


def _twice(document: DemoDocument, tokens: tuple[int, int]) -> list[int]:
    first, again = tokens
    return [*document.prompt[:first], *document.prompt[:again]]


def _found(place: Bench, method: str, drafts: Mapping[str, Any], prompts: Sequence[list[int]]) -> Found:
    """What became of each prompt in each way. Raises EngineFailed, TimeoutError."""
    found: Found = {way: [] for way in WAYS}
    with _engine(place, method, drafts, place.well.connector()) as engine:
        for prompt in prompts:
            engine.reset_prefix_cache()
            found[COLD].append(_ask(engine, prompt, "never"))
            found[HIT].append(hit := _ask(engine, prompt, "never"))
            found[RECALLED].append(_recall(engine, prompt, hit.answer))
    partly = {"kv_connector": "WithoutDrafter", "kv_connector_module_path": f"{__package__}.without_drafter"}
    with _engine(place, f"{method}-without", drafts, place.well.connector() | partly) as engine:
        for prompt, hit in zip(prompts, found[HIT], strict=True):
            found[WITHOUT].append(_recall(engine, prompt, hit.answer))
    return found


def _engine(place: Bench, name: str, drafts: Mapping[str, Any], connector: Mapping[str, Any]) -> EngineProcess:
    extra = {"speculative_config": dict(drafts)}
    config = EngineConfig(place.model, PAGE, 64, 1024, connector, extra=extra)
    with place.progress.waiting(f"starting vLLM: {name}"):
        engine = EngineProcess.start(in_one_process(config), place.folder / f"{name}.log")
    try:
        warm_up(engine, PAGE)
    except BaseException:
        engine.kill()
        raise
    return engine


def _ask(engine: EngineProcess, prompt: list[int], recall: str) -> Drafted:
    sampling = {"extra_args": {"kv_transfer_params": {"stepwell": {"recall": recall}}}}
    before = engine.metrics()
    answer = engine.ask_all([Question(prompt, ANSWER, sampling=sampling)])[0]
    after = engine.metrics()
    names = [f"vllm:spec_decode_{what}" for what in COUNTED]
    return Drafted(answer, *(after[name] - before.get(name, 0.0) for name in names))


def _recall(engine: EngineProcess, prompt: list[int], hit: Answer) -> Drafted:
    """A recall of as many tokens as the engine's own hit had. Raises TimeoutError where there is none."""
    for attempt in range(ATTEMPTS):
        time.sleep(attempt)  # a well that is too busy is not waited for
        engine.reset_prefix_cache()
        recall = _ask(engine, prompt, "always")
        if (recall.answer.local_tokens, recall.answer.external_tokens) == (0, hit.local_tokens):
            return recall
    raise TimeoutError(f"nothing was recalled as it was hit in {ATTEMPTS} attempts")


def _rows(name: str, found: Found) -> list[Row]:
    rows = []
    for way, all_of in found.items():
        share = stats.ratio_of_paired_means([(one.accepted, one.drafted) for one in all_of])
        length = stats.ratio_of_paired_means([(one.times + one.accepted, one.times) for one in all_of])
        rows += [
            Row(f"{name}, {way}: accepted of what was drafted", "", share, None, _beside(all_of, found[HIT])),
            Row("  tokens a step", "", length),
        ]
    unlike = sum(one.counts != hit.counts for one, hit in zip(found[RECALLED], found[HIT], strict=True))
    of = len(found[HIT])
    rows.append(Row(f"{name}: recalls with other drafts than the hit", "", _exactly(unlike, of), Target("<=", 0)))
    less = [_share(one) - _share(hit) for one, hit in zip(found[WITHOUT], found[HIT], strict=True)]
    what = f"{name}: share accepted without the drafter's KV, less that of the hit"
    rows.append(Row(what, "", stats.mean(less)))
    return rows


def _share(one: Drafted) -> float:
    return one.accepted / one.drafted


def _exactly(count: float, of: int) -> stats.Estimate:
    return stats.Estimate(count, count, count, of)


def _beside(all_of: Sequence[Drafted], hits: Sequence[Drafted]) -> str:
    drafted, accepted = (sum(getattr(one, what) for one in all_of) for what in ("drafted", "accepted"))
    same = sum(one.answer.token_ids == hit.answer.token_ids for one, hit in zip(all_of, hits, strict=True))
    return f"{accepted:.0f} of {drafted:.0f}; answers as after the hit: {same} of {len(hits)}"
