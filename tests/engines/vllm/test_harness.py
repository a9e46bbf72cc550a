"""The harness proved on a connector of a few lines: what is right passes, and each kind of wrong is found."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from .build import Setup
from .dict_connector import STORES, DictConnector
from .harness import Harness, Stuck
from .oracle import Oracle
from .worker import ForwardFailed


@pytest.fixture
def engine(tmp_path: Path):
    """Makes harnesses over a store that only this test has, and ends them."""
    made: list[Harness] = []

    def make(*, extra: dict[str, Any] | None = None, **setup: Any) -> Harness:
        setup.setdefault("load_failure_policy", "recompute")
        h = Harness(
            Setup(
                "DictConnector",
                tmp_path / "model",
                module=DictConnector.__module__,
                extra={"store": str(tmp_path), **(extra or {})},
                **setup,
            )
        )
        made.append(h)
        return h

    yield make
    for h in made:
        h.close()
    STORES.pop(str(tmp_path), None)


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(length)]


def recall(h: Harness, tokens: list[int], **add: Any) -> Any:
    """Serve a prompt that the engine's own cache has just forgotten."""
    if h.setup.prefix_caching:
        assert h.reset_prefix_cache()
    return h.serve(tokens, **add)


@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_hits_are_recalled_and_checked(engine: Any, page: int, sync: bool, prefix_caching: bool) -> None:
    h = engine(page=page, extra={"sync": sync}, prefix_caching=prefix_caching)
    cold = h.serve(prompt(300), max_tokens=30)
    warm = recall(h, prompt(300), max_tokens=30)
    assert (cold.local, cold.external, cold.computed) == (0, 0, 329)
    assert (warm.local, warm.external, warm.computed) == (0, 299 // page * page, 329 - 299 // page * page)
    assert warm.tokens == cold.tokens == h.chain(warm.request_id).output(30)
    assert warm.kv_transfer_params == {"pages": -(-329 // page)}
    if prefix_caching:
        assert h.serve(prompt(300)).local == 299 // page * page
    h.assert_clean()


@pytest.mark.parametrize(("fault", "found"), [("spoils", "other bytes"), ("loads nothing", "poison")])
@pytest.mark.parametrize("sync", [False, True])
def test_wrong_bytes_are_found(engine: Any, fault: str, found: str, sync: bool) -> None:
    h = engine(extra={"fault": fault, "sync": sync})
    h.serve(prompt(100))
    h.assert_clean()
    wrong = recall(h, prompt(100), max_tokens=3)
    assert wrong.external == 96
    assert {v.found for v in h.wrong_kv} == {found}
    assert h.wrong_tokens, "wrong KV leads to wrong tokens"
    with pytest.raises(AssertionError, match="wrong KV for r2 at token"):
        h.assert_clean()


@pytest.mark.parametrize("sync", [False, True])
def test_a_reported_failure_is_recomputed_and_forgiven(engine: Any, sync: bool) -> None:
    h = engine(extra={"fault": "spoils and says so", "sync": sync})
    h.serve(prompt(100))
    again = recall(h, prompt(100), max_tokens=5)
    assert again.tokens == h.chain(again.request_id).output(5)
    assert sum(h.failures.values()) == 5
    assert bool(h.forgiven) == sync  # an asynchronous load fails before any forward reads it
    h.assert_clean()


def test_a_step_over_failed_kv_leaves_wrong_kv(engine: Any) -> None:
    h = engine(extra={"fault": "spoils, says so, and saves the step", "sync": True})
    h.serve(prompt(100))
    recall(h, prompt(100) + prompt(60, seed=2))
    h.assert_clean()
    h.restart_engine(extra={**h.setup.extra, "fault": None})
    recall(h, prompt(100) + prompt(60, seed=2))
    assert {v.position for v in h.wrong_kv} == {100 // 16 * 16}


def test_policy_fail_ends_the_request(engine: Any) -> None:
    h = engine(extra={"fault": "spoils and says so"}, load_failure_policy=None)
    h.serve(prompt(100))
    assert recall(h, prompt(100)).finish_reason == "error"
    h.assert_clean()


def test_leaks_are_found(engine: Any) -> None:
    h = engine(extra={"fault": "leak"})
    h.add(prompt(100))
    with pytest.raises(Stuck, match="FINISHED_LENGTH_CAPPED"):
        h.run(max_steps=20)
    with pytest.raises(AssertionError, match="requests left"):
        h.assert_clean()
    h = engine()
    h.assert_clean()
    h.pool.get_new_blocks(2)
    with pytest.raises(AssertionError, match="2 of 64 pages leaked"):
        h.assert_clean()


def test_chunked_prefill_of_several_requests(engine: Any) -> None:
    h = engine(batch_tokens=48)
    for seed in range(3):
        h.add(prompt(200, seed), max_tokens=10)
    h.run()
    assert h.steps > 600 // 48
    assert h.reset_prefix_cache()
    warm = [h.add(prompt(200, seed) + prompt(50, seed + 10), max_tokens=10) for seed in range(3)]
    h.run()
    assert [h.requests[r].external for r in warm] == [192] * 3
    assert [h.requests[r].computed for r in warm] == [250 - 192 + 9] * 3
    h.assert_clean()


def test_a_full_pool_preempts(engine: Any) -> None:
    h = engine(num_pages=21, prefix_caching=False)
    rids = [h.add(prompt(100, seed), max_tokens=150) for seed in range(2)]
    h.run()
    assert sum(h.requests[r].preemptions for r in rids) >= 1
    for r in rids:
        o = h.requests[r]
        assert o.tokens == h.chain(r).output(150)
        assert o.computed <= 249 + o.preemptions * (h.setup.page + 1), "resumed by recall"
    h.assert_clean()


@pytest.mark.parametrize("runner_v2", [False, True])
@pytest.mark.parametrize("by", ["preempt", "reset"])
def test_a_forced_preemption_resumes(engine: Any, by: str, runner_v2: bool) -> None:
    h = engine(extra={"sync": by == "reset"}, runner_v2=runner_v2)
    a = h.add(prompt(100), max_tokens=40)
    h.run_until(lambda: len(h.requests[a].tokens) == 20)
    if by == "preempt":
        h.preempt(a)
        assert h.status(a) == "PREEMPTED"
    else:
        assert h.reset_prefix_cache(preempt=True)
    b = h.add(prompt(500, seed=2), max_tokens=20)
    h.step()
    cached = h.last_plan.scheduled_cached_reqs
    assert (a in cached.resumed_req_ids, a in cached.all_token_ids) == (not runner_v2,) * 2
    assert (a in [new.req_id for new in h.last_plan.scheduled_new_reqs]) == runner_v2
    h.run()
    assert h.requests[a].preemptions == 1
    assert h.requests[a].tokens == h.chain(a).output(40)
    assert h.requests[b].tokens == h.chain(b).output(20)
    assert any("request_ids" in call for call in h.workers[0].connector.calls) == runner_v2
    h.assert_clean()


@pytest.mark.parametrize("mid_step", [False, True])
@pytest.mark.parametrize("after", range(8))
def test_aborts(engine: Any, after: int, mid_step: bool) -> None:
    h = engine(extra={"delay": 3})
    h.serve(prompt(100))
    assert h.reset_prefix_cache()
    rid = h.add(prompt(100), max_tokens=50)
    seen = set()
    for _ in range(after):
        h.step()
        seen.add(h.status(rid))
    assert ("WAITING_FOR_REMOTE_KVS" in seen) == (after > 0)
    h.abort(rid, mid_step=mid_step)
    h.run()
    assert h.finished[rid].finish_reason == "abort"
    h.assert_clean()


def test_restart_forgets_all_but_the_outside(engine: Any) -> None:
    h = engine()
    h.serve(prompt(100), max_tokens=20)
    for kill in (False, True):
        scheduler, worker = h.scheduler, h.workers[0]
        h.restart_engine(kill=kill)
        assert h.scheduler is not scheduler and h.workers[0].kv_caches is not worker.kv_caches
        halves = scheduler.connector, worker.connector
        assert ["shutdown" in half.calls for half in halves] == [not kill] * 2
        assert h.serve(prompt(100)).external == 96
        h.assert_clean()
    h.close()
    assert all(half.calls.count("shutdown") == 1 for half in halves), "no thread of a killed engine outlives its test"


def test_other_weights_make_old_kv_wrong(engine: Any) -> None:
    h = engine()
    h.serve(prompt(100))
    h.restart_engine(weights=1)  # this connector has no identity, so it recalls the other model's KV
    assert h.serve(prompt(100)).external == 96
    assert h.violations


@pytest.mark.parametrize("fault", [None, "keeps on reset"])
def test_weights_changed_under_a_running_engine(engine: Any, fault: str | None) -> None:
    h = engine(extra={"fault": fault})
    rid = h.add(prompt(100), max_tokens=40)
    h.run_until(lambda: len(h.requests[rid].tokens) == 10)
    assert h.update_weights(7)
    h.run()
    assert bool(h.violations) == (fault is not None)


def test_two_ranks(engine: Any) -> None:
    h = engine(ranks=2)
    h.serve(prompt(100))
    assert {rank for _, rank in STORES[h.setup.extra["store"]]} == {0, 1}
    assert not (h.workers[0].words[0] == h.workers[1].words[0]).all(), "each rank has KV of its own"
    assert h.reset_prefix_cache()
    h.hold(1)
    rid = h.add(prompt(100), max_tokens=5)
    for _ in range(10):
        h.step()
    assert h.status(rid) == "WAITING_FOR_REMOTE_KVS", "received by one rank is not received"
    h.release(1)
    h.run()
    assert h.requests[rid].external == 96
    h.assert_clean()


def test_a_fault_of_one_rank_is_found(engine: Any) -> None:
    h = engine(ranks=2)
    h.serve(prompt(100))
    h.workers[1].connector.fault = "spoils"
    recall(h, prompt(100))
    assert {v.rank for v in h.wrong_kv} == {1}


@pytest.mark.parametrize("runner_v2", [False, True])
def test_asynchronous_scheduling(engine: Any, runner_v2: bool) -> None:
    h = engine(async_scheduling=True, runner_v2=runner_v2, ranks=2)
    assert isinstance(h.scheduler, AsyncScheduler) and h.scheduler.defer_block_free
    cold = h.serve(prompt(300), max_tokens=30)
    assert h.connector.calls[:3] == ["build_connector_meta", "build_connector_meta", "update_connector_output"]
    warm = recall(h, prompt(300), max_tokens=30)
    assert warm.external == 288
    assert warm.tokens == cold.tokens
    a, b = h.add(prompt(300), max_tokens=90), h.add(prompt(300, seed=2), max_tokens=90)
    h.run_until(lambda: len(h.requests[b].tokens) > 10)
    h.preempt(a)
    h.run_until(lambda: len(h.requests[b].tokens) > 30)
    h.abort(b, mid_step=True)
    h.run()
    assert (h.requests[a].preemptions, h.requests[a].tokens) == (1, h.chain(a).output(90))
    h.assert_clean()


@pytest.mark.parametrize("fault", [None, "saves half a forward"])
def test_a_forward_that_fails(engine: Any, fault: str | None) -> None:
    h = engine(extra={"fault": fault}, layers=3)
    h.add(prompt(100))
    h.fail_forward_next(layer=1)
    with pytest.raises(ForwardFailed):
        h.run()
    with pytest.raises(AssertionError, match="restart_engine"):
        h.step()
    h.restart_engine(kill=True)
    assert h.serve(prompt(100)).external == (0 if fault is None else 96)
    assert {(v.layer, v.found) for v in h.wrong_kv} == (set() if fault is None else {(2, "poison")})


def test_a_copy_from_pages_that_were_taken_back_is_found(engine: Any) -> None:
    h = engine(extra={"fault": "copies late"}, num_pages=9, prefix_caching=False)
    for seed in range(2):
        h.add(prompt(100, seed))
    h.run()
    recall(h, prompt(100, seed=0))
    assert h.violations


def test_no_recall_for_prompt_logprobs_nor_across_salts(engine: Any) -> None:
    h = engine()
    h.serve(prompt(100), salt="a")
    assert recall(h, prompt(100), salt="a").external == 96
    assert recall(h, prompt(100), salt="b").external == 0
    assert recall(h, prompt(100)).external == 0
    assert recall(h, prompt(100), salt="a", prompt_logprobs=1).external == 0
    h.assert_clean()


def test_the_oracle_tells_layers_ranks_weights_and_prefixes_apart() -> None:
    def kv(tokens: list[int], layer: int = 0, rank: int = 0, weights: int = 0) -> bytes:
        return Oracle(weights=weights, heads=2, words=8, vocab=1000).expected(tokens, 3, layer, rank)[2].tobytes()

    base = [5, 6, 7, 8]
    assert kv(base) == kv([5, 6, 7, 9])
    others = [kv([4, 6, 7]), kv([5, 6, 8]), kv(base, layer=1), kv(base, rank=1), kv(base, weights=1)]
    assert len({kv(base), *others}) == 6
