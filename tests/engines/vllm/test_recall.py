"""What is recalled, how much of it, and what never is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.client.patience import Patience

from .local import Engine, engine, open_well, prompt, setup_in


@pytest.mark.parametrize(
    ("page", "ranks", "prefix_caching"), [(16, 1, True), (16, 2, False), (32, 1, False), (128, 2, True)]
)
def test_prompt_and_answer_come_back(tmp_path: Path, page: int, ranks: int, prefix_caching: bool) -> None:
    with engine(tmp_path, page=page, ranks=ranks, prefix_caching=prefix_caching) as h:
        cold = h.serve(prompt(300), max_tokens=150)
        whole = (300 + 149) // page * page
        warm = h.recall([*prompt(300), *cold.tokens], max_tokens=5)
        assert (warm.local, warm.external) == (0, whole)
        assert warm.computed == 450 + 4 - whole
        h.restart_engine()
        again = h.serve(prompt(300), max_tokens=150)
        assert (again.local, again.external) == (0, 300 // page * page)
        assert h.right(cold) and h.right(warm) and h.right(again)
        h.assert_quiet()


class Answers:
    """What the well says of asks waits until `tell`."""

    def __init__(self, client: Any) -> None:
        self.client, self.found, self.waiting = client, client._found, []
        client._found = self.waiting.append

    def tell(self) -> None:
        for message in self.waiting:
            self.found(message)
        self.waiting.clear()


def test_an_engine_hit_waits_for_nobody_and_offers_nothing_twice(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        late, reserved = Answers(h.client), []
        reserve = h.client.reserve
        h.client.settle = None  # whoever waits for an answer calls it
        h.client.reserve = lambda parent, digests, epoch, first: (
            reserved.append(len(digests) // 32) or reserve(parent, digests, epoch, first)
        )
        seen = h.add(prompt(100), max_tokens=40)
        for _ in range(20):
            h.step()
        assert h.requests[seen].local == 96
        assert not reserved, "what the well has is not known yet"
        late.tell()
        assert h.stat("pinned_bytes") == 0
        h.run()
        assert h.right(h.requests[seen])
        assert sum(reserved) == 2, "blocks of the answer alone"
        assert h.stat("blocks") == 8
        h.assert_quiet()


def test_an_engine_hit_that_ends_before_the_answer_leaves_nothing(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        late = Answers(h.client)
        assert h.right(h.serve(prompt(100)))
        assert h.stat("pinned_bytes") == 0
        late.tell()
        h.assert_quiet()


def test_an_engine_hit_is_a_use(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        first = h.entries()
        h.serve(prompt(100, seed=2))
        h.serve(prompt(100))
        assert min(entry.history.used for entry in first) > max(e.history.used for e in h.entries() if e not in first)


def test_no_client_is_told_of_hits_unless_the_operator_wants_it(tmp_path: Path) -> None:
    """Whether and where a prompt is cached tells what others have asked. Nothing in a request turns it on."""
    with engine(tmp_path, extra={"receipts": False}) as h:
        ask = {"stepwell": {"recall": "always", "receipts": True}}
        assert h.serve(prompt(100), kv_transfer_params=ask).kv_transfer_params is None
        again = h.recall(prompt(100), kv_transfer_params=ask)
        assert (again.external, again.kv_transfer_params) == (96, None)
        rid = h.add(prompt(100, seed=2))
        h.step()
        h.abort(rid)
        h.run()
        assert h.requests[rid].kv_transfer_params is None
        h.assert_quiet()


def test_a_receipt_says_what_was_recalled(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        cold = h.serve(prompt(100))
        warm = h.recall(prompt(100))
        nothing = {
            "recalled_tokens": 0,
            "tiers": {"host": 0},
            "bytes": {"host": 0},
            "recall_ms": 0.0,
            "copy_ms": 0.0,
        }
        assert cold.kv_transfer_params is not None
        assert 0 <= cold.kv_transfer_params["stepwell"].pop("wait_ms") < 1e3, "the well was asked"
        assert cold.kv_transfer_params == {"stepwell": nothing}
        assert warm.kv_transfer_params is not None
        receipt = warm.kv_transfer_params["stepwell"]
        assert (receipt["recalled_tokens"], receipt["tiers"]) == (96, {"host": 96})
        assert receipt["bytes"] == {"host": h.stat("recalled_bytes")}
        assert receipt["recall_ms"] > receipt["copy_ms"] > 0
        with h.spoiled(3):
            cut = h.recall(prompt(100))
        assert cut.kv_transfer_params is not None
        assert cut.kv_transfer_params["stepwell"]["recalled_tokens"] == 48  # three of six blocks survived


def test_a_recall_may_start_inside_a_block(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"block_tokens": 64}) as h:
        h.serve(prompt(300))
        for local_pages in (1, 2, 3, 4, 5):
            h.forget()
            h.serve([*prompt(16 * local_pages + 1)[:-1], 7, 8])
            seen = h.serve(prompt(300), max_tokens=3)
            assert (seen.local, seen.external) == (16 * local_pages, 256 - 16 * local_pages)
            assert h.right(seen) and not h.failures
        h.assert_quiet()


def test_chunked_prefill_spills_and_recalls(tmp_path: Path) -> None:
    with engine(tmp_path, batch_tokens=48, long_prefill_threshold=40, extra={"block_tokens": 64}) as h:
        h.serve(prompt(500), max_tokens=20)
        tail = prompt(300)[:250] + prompt(200, seed=2)
        assert h.recall(tail, max_tokens=20).external == 192
        assert h.recall(tail).external == 448
        h.assert_quiet()


def test_requests_at_once_share_what_they_recall(tmp_path: Path) -> None:
    with engine(tmp_path, num_pages=129) as h:
        head = prompt(200)
        h.serve(head)
        h.forget()
        ids = [h.add(head + prompt(30, seed=n), max_tokens=10) for n in range(8)]
        h.run()
        assert all(h.right(h.requests[rid]) for rid in ids)
        assert all(h.requests[rid].cached >= 192 for rid in ids)
        h.assert_quiet()


def test_a_prompt_of_whole_blocks_is_recalled_whole(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(16 * 64 - 16), max_tokens=16)
        for tokens in (16 * 32, 16 * 60):
            seen = h.recall(prompt(16 * 64)[:tokens], max_tokens=4)
            assert (seen.external, seen.computed) == (tokens, 1 + 3)  # only the last token, and what follows
            assert h.right(seen)
        h.assert_quiet()


def test_hits_are_asynchronous_always(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        h.forget()
        answers = []
        matched = h.half.matched

        def heard(*args: Any) -> tuple[int | None, bool]:
            answers.append(matched(*args))
            return answers[-1]

        h.half.matched = heard  # type: ignore[method-assign]
        h.serve(prompt(100))
        assert answers == [(96, True)]
        assert not h.last_plan.has_sync_kv_loads


def test_a_prompt_shorter_than_a_block_is_a_counted_miss(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"block_tokens": 64}) as h:
        assert h.right(h.serve(prompt(63)))
        assert (h.counted("missed_short_prompt"), h.stat("requests"), h.stat("blocks")) == (1, 0, 0)
        assert h.recall(prompt(63)).external == 0
        h.assert_quiet()


def test_prompt_logprobs_recall_nothing_and_pin_nothing(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        h.forget()
        asked = h.stat("requests")
        rid = h.add(prompt(100), prompt_logprobs=1)
        h.step()
        assert (h.stat("pinned_bytes"), h.stat("requests")) == (0, asked)
        h.run()
        assert (h.requests[rid].external, h.requests[rid].computed) == (0, 100)
        h.assert_quiet()


def test_salts_separate(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100), salt="mine")
        assert h.recall(prompt(100), salt="yours").external == 0
        assert h.recall(prompt(100)).external == 0
        assert h.recall(prompt(100), salt="").external == 0
        assert h.recall(prompt(100), salt="mine").external == 96


@pytest.mark.parametrize(
    ("reason", "field"),
    [
        ("adapter", {"lora_request": object()}),
        ("multimodal", {"mm_features": [object()]}),
        ("prompt_embeds", {"prompt_embeds": object()}),
        ("streamed_prompt", {"resumable": True}),
    ],
)
def test_inputs_that_the_digest_does_not_know_bypass(tmp_path: Path, reason: str, field: dict[str, Any]) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        h.forget()
        blocks = h.stat("blocks")
        on_new_request = h.connector.on_new_request

        def dressed(request: Any) -> None:
            for name, value in field.items():
                setattr(request, name, value)  # as the connector sees it; the harness has no such inputs
            on_new_request(request)
            for name in field:
                setattr(request, name, [] if name == "mm_features" else None)

        h.connector.on_new_request = dressed
        seen = h.serve(prompt(100) + prompt(50, seed=2))
        assert (seen.external, h.counted(f"bypassed_{reason}")) == (0, 1)
        assert h.stat("blocks") == blocks
        h.assert_quiet()


def test_a_second_engine_recalls_what_the_first_spilled(tmp_path: Path) -> None:
    with open_well("32MiB") as well, Engine(setup_in(tmp_path), well) as a, Engine(setup_in(tmp_path), well) as b:
        a.serve(prompt(300), max_tokens=40)
        seen = b.serve(prompt(300), max_tokens=40)
        assert (seen.external, b.right(seen)) == (288, True)
        b.serve(prompt(200, seed=2))
        assert a.serve(prompt(200, seed=2)).external == 192
        a.assert_quiet()
        b.assert_quiet()


@pytest.mark.parametrize(
    "other",
    [
        {"extra": {"weights_id": "another"}},
        {"extra": {"block_tokens": 32}},
        {"page": 32},
        {"layers": 3},
        {"head_size": 16},
        {"kv_heads": 4},
        {"ranks": 2},
    ],
    ids=str,
)
def test_another_model_or_layout_gets_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    mine, yours = tmp_path / "a", tmp_path / "b"
    with open_well("64MiB") as well:
        with Engine(setup_in(mine), well) as a:
            a.serve(prompt(300))
        with Engine(setup_in(yours, **other), well) as b:
            assert b.serve(prompt(300), max_tokens=3).external == 0
            assert b.recall(prompt(300)).external > 0
            b.assert_quiet()


def test_a_well_that_never_answers_ends_the_wait(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        h.forget()
        h.client._patience = Patience(stall_s=0.02, total_s=0.1)
        found = h.client._found
        h.client._found = lambda message: found(replace_more(message))
        seen = h.serve(prompt(100))
        assert (seen.external, h.right(seen)) == (96, True), "what has landed is offered all the same"
        h.client._found = lambda message: None
        seen = h.recall(prompt(100))
        assert (seen.external, h.right(seen)) == (0, True)
        assert h.counted("missed_too_slow") == 2
        h.assert_quiet()


def replace_more(message: Any) -> Any:
    return type(message)(message.ticket, message.start, message.slots, True, "filling")


def test_asking_again_and_again_has_no_effect(tmp_path: Path) -> None:
    with engine(tmp_path, num_pages=41, max_seqs=4) as h:
        h.serve(prompt(400))
        h.forget()
        h.add(prompt(200, seed=2), max_tokens=100)
        h.add(prompt(200, seed=3), max_tokens=100)
        h.step()
        waiting = h.add(prompt(400))
        asked = h.stat("requests")
        for _ in range(10):
            h.step()
            assert h.status(waiting) == "WAITING"
            assert h.stat("pinned_bytes") == 25 * h.entries()[0].slots[0][0].owner.slot_bytes
        assert h.stat("requests") == asked
        h.run()
        assert h.requests[waiting].external == 400
        h.assert_quiet()


def test_an_arena_exhausted_by_pins_serves(tmp_path: Path) -> None:
    # A slab of 16 MiB holds 8 blocks of 1 MiB and more: pins of waiting requests may take half of it.
    big = {"layers": 4, "kv_heads": 16, "head_size": 64, "num_pages": 65}
    with engine(tmp_path, host="16MiB", extra={"block_tokens": 32}, **big) as h:
        for seed in range(4):
            h.serve(prompt(100, seed))
        h.forget()
        h.client._patience = Patience(stall_s=0.01, total_s=0.05)
        ids = [h.add(prompt(100, seed), max_tokens=2) for seed in range(4)]
        h.run()
        assert all(h.right(h.requests[rid]) for rid in ids)
        h.assert_quiet()


@pytest.mark.parametrize("order", [{"async_scheduling": True}, {"runner_v2": True, "async_scheduling": True}], ids=str)
def test_the_step_order_of_cuda(tmp_path: Path, order: dict[str, Any]) -> None:
    with engine(tmp_path, extra={"block_tokens": 32}, **order) as h:
        one, two = h.add(prompt(300), max_tokens=60), h.add(prompt(200, seed=2), max_tokens=60)
        h.run()
        assert h.right(h.requests[one]) and h.right(h.requests[two])
        h.assert_quiet()
        seen = h.recall([*prompt(300), *h.requests[one].tokens], max_tokens=30)
        assert seen.external >= 320
        assert h.right(seen)
        h.assert_quiet()


def test_engines_that_differ_only_by_pool_share(tmp_path: Path) -> None:
    with open_well("32MiB") as well, Engine(setup_in(tmp_path), well) as a:
        a.serve(prompt(300))
        with Engine(replace(setup_in(tmp_path), num_pages=33, batch_tokens=64), well) as b:
            assert b.serve(prompt(300)).external == 288


def test_nobody_waits_for_what_the_engine_has_itself(tmp_path: Path) -> None:
    """So nothing is counted as given up: the next turn of a conversation that is still in the engine's cache."""
    with engine(tmp_path, num_pages=129) as h:
        h.serve([*prompt(160), 1, 2, 3])
        again = h.serve([*prompt(160), *prompt(100, seed=5)])
        assert (again.local, again.external) == (160, 0)
        assert h.stat("gave_up_limit") == 0
        h.assert_quiet()
