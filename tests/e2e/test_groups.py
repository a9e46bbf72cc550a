"""Models whose layers keep their KV in several ways, by the real engine: a recall is exactly what the engine's own
prefix hit of the same length is. In float32, tokens as well as log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs the engine")

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from lab.rig.tiny import KINDS, VOCABULARY, write_model
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer, Question

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, in_one_process, start

pytestmark = pytest.mark.skipif(
    not hasattr(base, "KVConnectorTransferResults"), reason="models of several groups are not served with this vLLM"
)

PAGE, BATCH, CONTEXT = 32, 256, 1024
KEPT = 2 * PAGE  # the engine alone can go on behind every so many tokens; by default at the end of a prompt only
TURN = 40
PAGES = {
    "gemma3": (32,) * 6,
    "gemma4": (64,) * 5 + (32,),
    "llama4": (32,) * 4,
    "gpt-oss": (32,) * 2,
    "cohere2": (32,) * 4,
    "olmo3": (32,) * 4,
    "lfm2": (32,) * 4,
}
"""Tokens of a page, of each group. The longest one is what the engine's own hits are multiples of."""

SELDOM = {"gemma3", "gpt-oss", "cohere2", "olmo3"}  # they differ from others in their layers, hardly in their groups
SAMPLING = {"logprobs": 0, "extra_args": {"kv_transfer_params": {"stepwell": {"recall": "always"}}}}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    dice = random.Random(f"{tokens} {seed}")
    return [dice.randrange(3, VOCABULARY) for _ in range(tokens)]


def ask(engine: EngineProcess, tokens: list[int], salt: str | None = None, answer: int = 12) -> Answer:
    return engine.ask_all([Question(tokens, answer, salt, SAMPLING)])[0]


def same(answer: Answer, other: Answer) -> bool:
    return (answer.token_ids, answer.logprobs) == (other.token_ids, other.logprobs)


def assert_recalled(engine: EngineProcess, tokens: list[int], hit: Answer) -> None:
    """The engine has forgotten this prompt, and recalls what it had of it when it was `hit`. It does not wait for a
    well that is too busy: then it is asked again."""
    for _ in range(RECALL_ATTEMPTS):
        forget(engine)
        again = ask(engine, tokens)
        if again.external_tokens:
            break
    assert (again.local_tokens, again.external_tokens) == (0, hit.local_tokens)
    assert same(again, hit)


def assert_next_turn_recalled(engine: EngineProcess, first: list[int]) -> None:
    """A conversation that the engine knows, and others, under salts of their own, that it has forgotten."""
    turn = ask(engine, first, "known", TURN)
    then = [*first, *turn.token_ids, *prompt(50)]
    hit = ask(engine, then, "known")
    assert hit.local_tokens == (len(first) + TURN - 1) // KEPT * KEPT > len(first)
    for attempt in range(RECALL_ATTEMPTS):
        assert same(ask(engine, first, f"forgotten {attempt}", TURN), turn)
        forget(engine)
        again = ask(engine, then, f"forgotten {attempt}")
        if again.external_tokens:
            break
    assert again.external_tokens == hit.local_tokens
    assert same(again, hit)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] if kind in SELDOM else []) for kind in PAGES]
)
def test_a_recall_is_what_the_engine_alone_would_have_hit(kind: str, folder: Path, well: Well, tmp_path: Path) -> None:
    model, block = write_model(KINDS[kind], tmp_path / kind), max(PAGES[kind])
    extra = {"skip_tokenizer_init": True, "max_num_batched_tokens": BATCH}
    if kind == "lfm2":  # vLLM's CPU kernel of rotary embeddings takes queries and keys for one tensor
        extra["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    if "attention_chunk_size" not in KINDS[kind]:  # of chunks the engine keeps all
        extra["prefix_cache_retention_interval"] = KEPT
    connector = well.connector(canary=0, block_tokens=block)
    settings = in_one_process(
        config(model, connector, dtype="float32", page=PAGE, pool_pages=400, max_model_len=CONTEXT, extra=extra)
    )
    # One block; beyond the window; where a chunk ends; more than one step; nearly all that fits.
    prompts = [prompt(tokens) for tokens in (block + 1, 181, 257, 500, CONTEXT - TURN)]
    hits = []
    with start(settings, folder, kind) as engine:
        assert f"kv cache group sizes {PAGES[kind]}" in engine.log.read_text(), "they are groups of the engine, too"
        for tokens in prompts:
            cold, hit = ask(engine, tokens), ask(engine, tokens)
            assert (cold.local_tokens, cold.external_tokens) == (0, 0)
            assert (hit.local_tokens, hit.external_tokens) == ((len(tokens) - 1) // block * block, 0)
            assert_recalled(engine, tokens, hit)
            hits.append(hit)
        other = ask(engine, [*prompt(PAGE), *prompts[-1][PAGE:]])
        assert not same(other, hits[-1]), "so a page that is wrong would be noticed"
        assert_next_turn_recalled(engine, prompt(300))
    with start(settings, folder, f"{kind}, started again") as engine:
        for tokens, hit in zip(prompts, hits, strict=True):
            assert_recalled(engine, tokens, hit)
    eventually(well.is_alone, "no engine is left")
