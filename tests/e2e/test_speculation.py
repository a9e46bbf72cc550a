"""An engine that drafts tokens by n-grams: what it generated is recalled in the next turn as it was accepted. In
float32 all answers must be equal."""

from __future__ import annotations

from pathlib import Path

from .wells import Well, config, forget, in_one_process, recalled, receipt, start, warm_up

PAGE, PROMPT, ANSWER, DRAFTS = 32, 530, 96, 4
NGRAMS = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def test_the_next_turn_recalls_what_was_generated_with_drafts(
    model: Path, folder: Path, well: Well, texts: list[list[int]]
) -> None:
    connector = well.connector(canary=0, block_tokens=PAGE)
    settings = config(model, connector, page=PAGE, pool_pages=60, dtype="float32", extra={"speculative_config": NGRAMS})
    with start(in_one_process(settings), folder, "engine") as engine:
        warm_up(engine, PAGE)
        for text in texts[:2]:
            forget(engine)
            turn = [*text[:PROMPT], *engine.ask(text[:PROMPT], ANSWER).token_ids, *text[:20]]
            hit = engine.ask(turn, ANSWER)
            assert hit.local_tokens >= PROMPT
            forget(engine)
            again = recalled(engine, turn, ANSWER)
            assert again.token_ids == hit.token_ids
            assert receipt(again)["recalled_tokens"] >= (PROMPT + ANSWER - 1 - DRAFTS) // PAGE * PAGE
        log = engine.log.read_text()
    assert "stepwell is inert" not in log and "ngram" in log
