"""Engines whose drafter is a model, by the real engine: after a recall it drafts as after the engine's own prefix hit
of the same length, and as many of its drafts are accepted. In float32, with tokens and log-probabilities as well."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs the engine")

from lab.bench.speculation import without_drafter
from lab.rig.drafters import VOCABULARY, write_pair
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.wire import Answer, Question

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, in_one_process, start

PAGE, BATCH, CONTEXT = 32, 256, 1024
TURN = 80
LENGTHS = (2 * PAGE + 1, 181, 257, 500, CONTEXT - TURN)
"""Of one page, where a drafter looks at hidden states; more than one step; nearly all that fits."""

RECOMPUTED = {"eagle": PAGE, "eagle3": PAGE, "mtp": PAGE, "draft_model": 0}
"""Tokens that are computed again although they were found: their KV in the drafter may be another request's."""

SELDOM = {"eagle3", "mtp", "draft_model"}
METHODS = [pytest.param(method, marks=[pytest.mark.nightly] if method in SELDOM else []) for method in RECOMPUTED]
SAMPLING = {"logprobs": 0, "extra_args": {"kv_transfer_params": {"stepwell": {"recall": "always"}}}}


@dataclass(frozen=True, slots=True)
class Drafted:
    answer: Answer
    drafted: float
    accepted: float

    @property
    def told(self) -> Any:
        """What is the same after a recall and after a hit."""
        return self.answer.token_ids, self.answer.logprobs, self.drafted, self.accepted


def prompt(tokens: int, seed: object = 0) -> list[int]:
    dice = random.Random(f"{tokens} {seed}")
    return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]


def ask(engine: EngineProcess, tokens: list[int], salt: str | None = None) -> Drafted:
    before = engine.metrics()
    answer = engine.ask_all([Question(tokens, TURN, salt, SAMPLING)])[0]
    after = engine.metrics()
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return Drafted(answer, *(after.get(name, 0.0) - before.get(name, 0.0) for name in names))


def asked_again(engine: EngineProcess, tokens: list[int], hit: Drafted) -> Drafted:
    """The engine has forgotten this prompt, and recalls what it had of it when it was `hit`. It does not wait for a
    well that is too busy: then it is asked again."""
    for _ in range(RECALL_ATTEMPTS):
        forget(engine)
        again = ask(engine, tokens)
        if again.answer.external_tokens:
            break
    assert (again.answer.local_tokens, again.answer.external_tokens) == (0, hit.answer.local_tokens)
    return again


def settings(model: Path, connector: dict[str, Any], drafts: dict[str, Any] | None) -> EngineConfig:
    extra = {"skip_tokenizer_init": True, "max_num_batched_tokens": BATCH, "speculative_config": drafts}
    shape: dict[str, Any] = {"page": PAGE, "pool_pages": 100, "max_model_len": CONTEXT}
    return in_one_process(config(model, connector, dtype="float32", extra=extra, **shape))


def assert_next_turn_recalled(engine: EngineProcess, first: list[int]) -> None:
    """A conversation that the engine knows, and another, under a salt of its own, that it has forgotten."""
    turn = ask(engine, first, "known")
    then = [*first, *turn.answer.token_ids, *prompt(50)]
    hit = ask(engine, then, "known")
    assert hit.answer.local_tokens is not None and hit.answer.local_tokens > len(first)
    for attempt in range(RECALL_ATTEMPTS):
        assert ask(engine, first, f"forgotten {attempt}").told == turn.told
        forget(engine)
        again = ask(engine, then, f"forgotten {attempt}")
        if again.answer.external_tokens:
            break
    assert again.answer.external_tokens == hit.answer.local_tokens
    assert again.told == hit.told


@pytest.mark.parametrize("method", METHODS)
def test_a_recall_drafts_as_the_engine_alone_would(method: str, folder: Path, well: Well, tmp_path: Path) -> None:
    model, drafts = write_pair(method, tmp_path)
    engines = settings(model, well.connector(canary=0, block_tokens=PAGE), drafts)
    prompts = [prompt(tokens) for tokens in LENGTHS]
    hits = []
    with start(engines, folder, method) as engine:
        for tokens in prompts:
            cold, hit = ask(engine, tokens), ask(engine, tokens)
            assert (cold.answer.local_tokens, cold.answer.external_tokens) == (0, 0)
            known = (len(tokens) - 1) // PAGE * PAGE - RECOMPUTED[method]
            assert (hit.answer.local_tokens, hit.answer.external_tokens) == (known, 0)
            assert asked_again(engine, tokens, hit).told == hit.told
            hits.append(hit)
        assert all(0 < hit.accepted < hit.drafted for hit in hits)
        assert_next_turn_recalled(engine, prompt(300))
    with start(engines, folder, f"{method}, started again") as engine:
        for tokens, hit in zip(prompts, hits, strict=True):
            assert asked_again(engine, tokens, hit).told == hit.told
    eventually(well.is_alone, "no engine is left")


@pytest.mark.nightly
@pytest.mark.parametrize("method", RECOMPUTED)
def test_another_drafter_or_none_finds_nothing(method: str, folder: Path, well: Well, tmp_path: Path) -> None:
    """Nor is what the test above compares the same whatever the drafter's KV is."""
    model, drafts = write_pair(method, tmp_path)
    connector = well.connector(canary=0, block_tokens=PAGE)
    prompts = [prompt(tokens, method) for tokens in LENGTHS]  # an engine without a drafter is that of all methods
    with start(settings(model, connector, drafts), folder, f"{method}, first") as engine:
        hits = [(ask(engine, tokens), ask(engine, tokens))[1] for tokens in prompts]
        assert all(asked_again(engine, tokens, hit).told == hit.told for tokens, hit in zip(prompts, hits, strict=True))
    partly = connector | {"kv_connector": "WithoutDrafter", "kv_connector_module_path": without_drafter.__name__}
    with start(settings(model, partly, drafts), folder, f"{method}, without the drafter's") as engine:
        again = [asked_again(engine, tokens, hit) for tokens, hit in zip(prompts, hits, strict=True)]
        assert [drafted.answer.token_ids for drafted in again] == [hit.answer.token_ids for hit in hits]
        assert [drafted.told for drafted in again] != [hit.told for hit in hits]
    other_model, other = write_pair(method, tmp_path / "other", 2)
    assert other_model.name == model.name
    for name, where, wanted in (("another drafter", other_model, other), ("no drafter", model, None)):
        with start(settings(where, connector, wanted), folder, f"{method}, {name}") as engine:
            for tokens in prompts:
                answer = ask(engine, tokens).answer
                assert (answer.local_tokens, answer.external_tokens) == (0, 0)
            hit = ask(engine, prompts[-1])
            asked_again(engine, prompts[-1], hit)
    eventually(well.is_alone, "no engine is left")
