"""MLA by the real engine. On CPUs without AMX vLLM keeps no prefix of it, so that no hit of the engine's own can be
compared: a recall is what the whole prompt gives, but for the rounding of float32, and the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm._custom_ops", reason="needs the engine")

from vllm import _custom_ops

from lab.rig.tiny import KINDS, VOCABULARY, write_model
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer, Question

from .wells import RECALL_ATTEMPTS, Well, config, eventually, in_one_process, receipt, start

pytestmark = pytest.mark.skipif(
    not hasattr(_custom_ops, "gather_mla_context_cache_cpu"), reason="this vLLM cannot go on behind a prefix of MLA"
)

PAGE = 16  # no other is possible for MLA on a CPU
BLOCK, CONTEXT, ANSWER = 2 * PAGE, 1024, 12
SAMPLING = {"logprobs": 0, "extra_args": {"kv_transfer_params": {"stepwell": {"recall": "always"}}}}
LENGTHS = (BLOCK + 1, 181, 257, 500, CONTEXT - ANSWER)
"""One block and one token more, which is computed as a decode; others, of which the rest is a prefill."""


@pytest.fixture(scope="module", params=["deepseek"])
def new_engine(
    folder: Path, well: Well, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], EngineProcess]]:
    model = write_model(KINDS[request.param], tmp_path_factory.mktemp(request.param))
    # vLLM's CPU kernel of rotary embeddings takes queries and keys for one tensor.
    extra = {"skip_tokenizer_init": True, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    connector = well.connector(canary=0, block_tokens=BLOCK)
    settings = in_one_process(
        config(model, connector, dtype="float32", page=PAGE, pool_pages=200, max_model_len=CONTEXT, extra=extra)
    )
    yield lambda name: start(settings, folder, name)
    eventually(well.is_alone, "no engine is left")


def prompt(tokens: int, seed: int = 0) -> list[int]:
    dice = random.Random(f"{tokens} {seed}")
    return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]


def question(tokens: list[int], salt: str | None = None, answer: int = ANSWER) -> Question:
    return Question(tokens, answer, salt, SAMPLING)


def recalled(answer: Answer) -> int:
    found: int = receipt(answer)["recalled_tokens"]
    return found


def assert_recalled(engine: EngineProcess, asked: Question, cold: Answer) -> Answer:
    for _ in range(RECALL_ATTEMPTS):
        again = engine.ask_all([asked])[0]
        if recalled(again):
            break
    assert recalled(again) == (len(asked.prompt) - 1) // BLOCK * BLOCK
    assert_alike(again, cold)
    return again


def assert_alike(answer: Answer, other: Answer) -> None:
    assert answer.token_ids == other.token_ids
    assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_recall_is_what_the_whole_prompt_gives(new_engine: Callable[[str], EngineProcess]) -> None:
    prompts: list[Any] = [question(prompt(tokens)) for tokens in LENGTHS]
    with new_engine("first") as engine:
        assert "CPU_MLA" in engine.log.read_text()
        cold = engine.ask_all(prompts[:1])
        for asked in prompts[1:]:
            cold += engine.ask_all([asked])
        assert not any(recalled(answer) or answer.local_tokens for answer in cold)
        first = [assert_recalled(engine, *pair) for pair in zip(prompts, cold, strict=True)]
        again = [assert_recalled(engine, *pair) for pair in zip(prompts, cold, strict=True)]
        assert [answer.logprobs for answer in first] == [answer.logprobs for answer in again]
        other = engine.ask_all([question([*prompt(BLOCK), *prompts[-1].prompt[BLOCK:]])])[0]
        assert other.logprobs != pytest.approx(cold[-1].logprobs, abs=1e-4), "a page that is wrong would be noticed"
    with new_engine("started again") as engine:
        for pair in zip(prompts, cold, strict=True):
            assert_recalled(engine, *pair)


def test_prompts_with_and_without_a_prefix_in_one_step(new_engine: Callable[[str], EngineProcess]) -> None:
    known = [prompt(tokens, seed=1) for tokens in (97, 230, 311)]
    new = [prompt(tokens, seed=1) for tokens in (60, 140)]
    with new_engine("together") as engine:
        cold = [engine.ask_all([question(one)])[0] for one in known]
        alone = [engine.ask_all([question(one, "alone")])[0] for one in new]
        for attempt in range(RECALL_ATTEMPTS):
            questions = [question(known[0]), question(new[0], f"{attempt}"), question(known[1])]
            together = engine.ask_all([*questions, question(new[1], f"{attempt}"), question(known[2])])
            if all(recalled(answer) for answer in together[::2]):
                break
        assert [recalled(answer) for answer in together] == [96, 0, 224, 0, 288]
        for answer, one in zip(together, (cold[0], alone[0], cold[1], alone[1], cold[2]), strict=True):
            assert_alike(answer, one)
