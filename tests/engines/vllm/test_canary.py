"""Canaries: prefixes that could be recalled and are computed instead. Whatever happens to one, its request is answered,
its lease ends, and only other weights are an alarm."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the engine")


from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common import canaries
from stepwell.engines.common.canaries import Canaries, kind_of
from stepwell.engines.common.plan import Compare, Shape
from stepwell.engines.common.requests import Tracked
from stepwell.engines.paged.compare import WORST, relative_error
from stepwell.engines.paged.cpu import CpuCopies
from stepwell.engines.vllm.scheduler import spills
from stepwell.protocol.messages import SLOT_REF

from .local import Engine, engine, open_well, prompt, setup_in
from .test_faults import lose, rejoin

ALL: dict[str, Any] = {"canary": 1}
ORDERS: list[dict[str, Any]] = [{}, {"ranks": 2}, {"async_scheduling": True}, {"runner_v2": True}]


def verdicts(h: Engine) -> tuple[int, int, int]:
    """Canaries that were clean, those that were not, and namespaces in quarantine."""
    return h.stat("canaries_clean"), h.stat("canaries_mismatched"), h.stat("quarantined_namespaces")


# what is a canary, and what it costs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("blocks", [{}, {"block_tokens": 64}], ids=str)
def test_a_canary_is_computed_compared_and_clean(tmp_path: Path, order: dict[str, Any], blocks: dict[str, int]) -> None:
    with engine(tmp_path, batch_tokens=96, extra=ALL | blocks, **order) as h:
        told, tell = [], h.client.canary
        h.client.canary = lambda *said: (told.append(said), tell(*said))
        for seed in range(12):
            h.serve(prompt(200, seed), max_tokens=1 + seed % 3)
            assert h.right(again := h.recall(prompt(200, seed), max_tokens=1 + seed % 2))
            assert (again.external, again.kv_transfer_params["stepwell"]["recalled_tokens"]) == (0, 0)
            assert again.kv_transfer_params["stepwell"]["canary_tokens"] == 192
        assert verdicts(h) == (12, 0, 0)
        assert h.counted("canaries") == 12
        assert [(kind, len(errors)) for _, _, kind, errors in told] == [("float32", 2 * 2 * len(h.workers))] * 12
        assert h.stat("recalled_blocks") == 0, "a comparison is no recall"
        h.assert_quiet()


def test_one_prefix_in_a_thousand_costs_a_thousandth(tmp_path: Path) -> None:
    """Without being told: of the tokens that could be recalled a thousandth is computed, and all the rest recalled."""
    with engine(tmp_path, num_pages=129) as h:
        prompts = [prompt(33, seed) for seed in range(20)]
        for tokens in prompts:
            h.serve(tokens)
        for _ in range(50):
            h.forget()
            for tokens in prompts:
                h.add(tokens)
            h.run()
        recalled = sum(outcome.external for outcome in h.requests.values())
        assert (h.counted("canaries"), h.counted("canary_tokens"), recalled) == (1, 32, 32 * 999)
        shown = [stats.get("canary_tokens/", 0) for stats in h.connector_stats]
        assert sum(shown) == 32, "on the engine's own page too"
        h.assert_quiet()


def test_no_canaries_where_none_are_wanted_or_nothing_can_be_compared(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"canary": 0}) as h:
        h.serve(prompt(100))
        for _ in range(20):
            assert h.recall(prompt(100)).external == 96
    assert kind_of("torch.bfloat16") == "bfloat16"
    assert kind_of("torch.uint8") is None


def test_asking_again_and_again_is_one_prefix(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"canary": 3}) as h:
        h.serve(prompt(100))
        seen = []
        for _ in range(6):
            h.forget()
            rid = h.add(prompt(100))
            request = h.scheduler.requests[rid]
            for _ in range(5):
                h.half.matched(request, 0)
            h.run()
            seen.append(h.requests[rid].external)
        assert seen == [96, 96, 0, 96, 96, 0]
        h.assert_quiet()


def test_behind_an_engine_hit_only_what_is_computed_is_compared(tmp_path: Path) -> None:
    with engine(tmp_path, extra=ALL | {"block_tokens": 64}) as h:
        h.serve(prompt(300))
        for pages, compared in ((1, True), (5, True), (11, True), (13, False)):
            h.forget()
            h.serve([*prompt(16 * pages + 1)[:-1], 7, 8])
            before = sum(verdicts(h))
            seen = h.serve(prompt(300), max_tokens=2)
            assert h.right(seen)
            assert (seen.local, seen.external) == (16 * pages, 0 if compared else 256 - 16 * pages)
            assert sum(verdicts(h)) - before == compared
        assert verdicts(h)[1:] == (0, 0)
        h.assert_quiet()


def test_a_step_compares_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spills, "STEP_BYTES", 1)
    with engine(tmp_path, extra=ALL, batch_tokens=512) as h:
        for seed in range(3):
            h.serve(prompt(100, seed))
        h.forget()
        for seed in range(3):
            h.add(prompt(100, seed), max_tokens=8)
        plan, compared = h.half.plan, []

        def noted(out: Any) -> Any:
            made = plan(out)
            compared.append(len(made.compares))
            return made

        with patch.object(h.half, "plan", noted):
            h.run()
        assert [n for n in compared if n] == [1, 1, 1], "one at least, and no second one"
        assert verdicts(h) == (3, 0, 0)
        h.assert_quiet()


# by hand --------------------------------------------------------------------------------------------------------------


class Noted:
    """As much of a scheduler's client as canaries use."""

    def __init__(self) -> None:
        self.leased: list[tuple[int, int]] = []
        self.told: list[tuple[Any, ...]] = []

    def recall(self, ask: Any, first: int, blocks: int, *, compare: bool) -> tuple[int, Any]:
        assert compare
        self.leased.append((first, blocks))
        return len(self.leased), np.zeros((blocks, 1), SLOT_REF)

    def canary(self, *said: Any) -> None:
        self.told.append(said)

    def count(self, name: str, n: int = 1) -> None:
        pass


def by_hand(world: int = 1, shard_bytes: int = 4096, kind: str | None = "float32") -> tuple[Canaries, Noted]:
    client = Noted()
    shape = Shape(page=16, block_tokens=16, shard_bytes=shard_bytes, world=world)
    return Canaries(shape, cast(SchedulerClient, client), 1, kind), client


def begun(of: Canaries, ask: Any = None) -> Tracked:
    """A request of ten blocks that is a canary, and has its pages."""
    request: Any = SimpleNamespace(num_tokens=161)
    tracked = Tracked(request, order=1, chain=None, epoch=5, life=1, tables=[list(range(10))])
    tracked.ask = ask or PrefixQuestion(1, 7, 0.0, blocks=10)
    assert of.takes(tracked, 0, 10) and of.begins(tracked)
    return tracked


@pytest.mark.parametrize(("shard_bytes", "blocks"), [(4096, 4), (2 << 20, 2), (64 << 20, 1)])
def test_a_canary_leases_few_blocks_and_few_bytes(shard_bytes: int, blocks: int) -> None:
    of, client = by_hand(shard_bytes=shard_bytes)
    for _ in range(20):
        begun(of)
    assert {count for _, count in client.leased} == {blocks}
    assert all(0 <= first <= 10 - blocks for first, _ in client.leased)


def test_blocks_are_compared_once_when_their_step_is_confirmed() -> None:
    of, client = by_hand()
    tracked = begun(of)
    ((first, count),) = client.leased
    tracked.confirmed = 16 * (first + count) - 1
    assert of.ready(tracked) is None
    tracked.confirmed += 1
    compare = of.ready(tracked)
    assert compare is not None and [pages for _, pages, _ in compare.blocks] == [
        [n] for n in range(first, first + count)
    ]
    tracked.canary_lease = None  # it is planned
    assert of.ready(tracked) is None
    of.give_up(tracked)
    assert not of.waits, "its lease is the workers' to end"


def test_what_is_given_up_is_told_to_the_workers_once() -> None:
    of, _ = by_hand()
    tracked = begun(of)
    of.give_up(tracked)
    of.give_up(tracked)
    assert of.waits and of.take_given_up() == [Compare(7, 1, [])]
    assert not of.waits and of.ready(tracked) is None


def compared(of: Canaries) -> int:
    """The transfer of one more canary that workers compare."""
    tracked = begun(of)
    tracked.confirmed = 160
    compare = of.ready(tracked)
    assert compare is not None
    return compare.transfer


def test_a_canary_is_told_with_the_errors_of_all_ranks_in_their_order() -> None:
    of, client = by_hand(world=3)
    transfer = compared(of)
    for rank in (2, 0, 0):
        of.compared(rank, transfer, [rank / 8])
    assert client.told == []
    of.compared(1, transfer, [1 / 8])
    assert client.told == [(7, 5, "float32", [0.0, 1 / 8, 2 / 8])]
    of.compared(1, transfer, [9.0])
    assert len(client.told) == 1


def test_a_canary_that_one_rank_could_not_compare_is_none() -> None:
    of, client = by_hand(world=2)
    transfer = compared(of)
    of.compared(0, transfer, [])
    of.compared(1, transfer, [9.0])
    assert client.told == []


def test_canaries_that_nobody_answers_for_are_forgotten() -> None:
    of, client = by_hand()
    transfers = [compared(of) for _ in range(canaries.MAX_OPEN + 1)]
    assert len(of._open) == canaries.MAX_OPEN
    for transfer in (transfers[0], transfers[1], transfers[-1]):
        of.compared(0, transfer, [float(transfer)])
    assert [said[-1] for said in client.told] == [[2.0], [canaries.MAX_OPEN + 1.0]]


def test_nothing_is_a_canary_where_numbers_cannot_be_compared() -> None:
    of, _ = by_hand(kind=None)
    request: Any = SimpleNamespace(num_tokens=161)
    assert not of.takes(Tracked(request, order=1, chain=None, epoch=0, life=1), 0, 10)


def test_a_well_that_is_lost_while_a_canary_begins() -> None:
    """The link's thread takes the ask's blocks back at any moment."""

    class Fading:
        session = 7

        def __init__(self) -> None:
            self.looks = 0

        @property
        def blocks(self) -> int:
            self.looks += 1
            return 10 if self.looks == 1 else 0

    of, client = by_hand()
    begun(of, Fading())
    assert [count for _, count in client.leased] == [4], "of a session that is gone, as workers find"


# other weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_other_weights_of_the_same_name_are_noticed_at_the_second(tmp_path: Path, order: dict[str, Any]) -> None:
    with engine(tmp_path, extra=ALL, **order) as h:
        for seed in range(4):
            h.serve(prompt(100, seed))
        h.restart_engine(weights=9)  # and weights_id says that they are the same
        for seed, verdict in enumerate([(0, 1, 0), (0, 2, 1), (0, 2, 1)]):
            assert h.right(h.serve(prompt(100, seed), max_tokens=3))
            assert verdicts(h) == verdict
        assert h.stat("blocks") == 0, "nothing of it is kept"
        assert (h.stat("misses_quarantined"), h.stat("spills_refused_quarantined")) == (6, 6)
        h.restart_engine()
        assert h.right(h.serve(prompt(100)))
        assert h.stat("blocks") == 0, "nor taken in, whoever comes"
        h.assert_quiet()
        h.well.hierarchy.operator.clear(frozenset({"host"}), b"", lambda sums: None)
        h.well.pump()
        assert verdicts(h)[2] == 0
        h.serve(prompt(100))
        assert h.right(h.recall(prompt(100)))
        assert verdicts(h) == (1, 2, 0)
        h.assert_quiet()


def test_weights_that_change_under_a_running_engine(tmp_path: Path) -> None:
    """With a reset of the connector they are a namespace of their own; without one they are what a canary is for."""
    with engine(tmp_path, extra=ALL) as h:
        h.serve(prompt(100))
        h.update_weights(1)
        h.serve(prompt(100))
        assert h.right(h.recall(prompt(100)))
        assert verdicts(h) == (1, 0, 0)
        h.oracle.weights = 2
        for worker in h.workers:
            worker.oracle.weights = 2
        for _ in range(2):
            assert h.right(h.recall(prompt(100)))
        assert verdicts(h) == (1, 2, 1)
        assert not h.violations


def test_a_canary_under_way_when_weights_change_says_nothing(tmp_path: Path) -> None:
    for steps in range(1, 7):
        with engine(tmp_path, extra=ALL, batch_tokens=64) as h:
            h.serve(prompt(300))
            h.forget()
            rid = h.add(prompt(300), max_tokens=20)
            for _ in range(steps):
                h.step()
            h.update_weights(3)
            h.run()
            assert h.right(h.requests[rid])
            assert verdicts(h)[1:] == (0, 0)
            h.assert_quiet()


def test_what_was_compared_before_a_reset_and_is_told_after_it_counts_for_nothing(tmp_path: Path) -> None:
    """Weights change, a step is made, and only then the connector is told."""
    with engine(tmp_path, extra=ALL) as h:
        h.serve(prompt(100))
        canaries, late = h.half._canaries, []
        with patch.object(canaries, "compared", lambda *said: late.append(said)):
            h.oracle.weights = 1
            h.recall(prompt(100))
        assert late
        assert h.reset_prefix_cache(connector=True)
        for said in late:
            canaries.compared(*said)
        assert verdicts(h) == (0, 0, 0)


# whatever happens to a canary -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_abort_at_any_step_of_a_canary_leaves_nothing(tmp_path: Path, order: dict[str, Any]) -> None:
    with engine(tmp_path, extra=ALL, batch_tokens=64, **order) as h:
        h.serve(prompt(300), max_tokens=2)
        for at in range(12):
            for mid_step in (False, True):
                h.forget()
                rid = h.add(prompt(300) + prompt(100, seed=9 + at), max_tokens=20)
                other = h.add(prompt(150, seed=3), max_tokens=5)
                for _ in range(at):
                    h.step()
                h.abort(rid, mid_step=mid_step)
                h.run()
                assert h.right(h.requests[other])
                h.assert_quiet()
        assert verdicts(h)[0] > 12
        assert verdicts(h)[1:] == (0, 0)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_preempted_canary_is_one_less(tmp_path: Path, order: dict[str, Any]) -> None:
    with engine(tmp_path, extra=ALL, batch_tokens=64, **order) as h:
        h.serve(prompt(300), max_tokens=2)
        for at in range(1, 9):
            h.forget()
            rid = h.add(prompt(300), max_tokens=12)
            other = h.add(prompt(200, seed=at), max_tokens=12)
            for _ in range(at):
                h.step()
            for each in (rid, other):
                if h.status(each) == "RUNNING":
                    h.preempt(each)
            h.run()
            assert h.right(h.requests[rid]) and h.right(h.requests[other])
            h.assert_quiet()
        assert verdicts(h)[0] >= 4, "the others went on with an engine hit"
        assert verdicts(h)[1:] == (0, 0)


def test_a_request_lingers_only_for_a_canary_that_is_computed(tmp_path: Path) -> None:
    """A request of one token ends before its step is confirmed; one that is aborted in its prefill never will be."""
    with engine(tmp_path, extra=ALL, batch_tokens=64) as h:
        h.serve(prompt(300))
        assert h.recall(prompt(300)).finish_reason == "length"
        assert verdicts(h)[0] == 1
        h.forget()
        with patch.object(canaries.random, "randrange", lambda first, last: last - 1):  # the last blocks
            rid = h.add(prompt(300))
            h.step()
            h.step()
            h.abort(rid)
        assert not h.half.live.lingering
        assert h.half.busy, "its lease is still to be ended"
        h.run()
        h.assert_quiet()


def test_slots_that_change_meanwhile_are_not_compared(tmp_path: Path) -> None:
    with engine(tmp_path, extra=ALL, batch_tokens=64) as h:
        h.serve(prompt(300))
        h.forget()
        rid = h.add(prompt(300))
        h.step()
        for entry in h.entries():
            for slab, slot in entry.slots:
                slab.renew(slot)
        h.run()
        assert h.right(h.requests[rid])
        assert verdicts(h) == (0, 0, 0)
        h.assert_quiet()


def test_a_slot_that_changes_while_it_is_compared(tmp_path: Path) -> None:
    compare = CpuCopies.errors

    def then_renew(self: CpuCopies, fresh: Any, stored: Any) -> list[float]:
        errors = compare(self, fresh, stored)
        for entry in h.entries():
            for slab, slot in entry.slots:
                slab.renew(slot)
        return [9.0] * len(errors)

    with engine(tmp_path, extra=ALL) as h:
        h.serve(prompt(20))
        with patch.object(CpuCopies, "errors", then_renew):
            assert h.right(h.recall(prompt(20)))
        assert verdicts(h) == (0, 0, 0)
        h.assert_quiet()


def test_canaries_while_blocks_are_evicted(tmp_path: Path) -> None:
    """A host tier of few blocks, and more prompts than it holds."""
    rng = random.Random(5)
    with engine(tmp_path, host="16MiB", page=128, num_pages=33, kv_heads=8, head_size=128, layers=2, extra=ALL) as h:
        for _ in range(16):
            seed = rng.randrange(4)
            h.forget()
            ids = [h.add(prompt(700, seed + n)[: rng.randrange(200, 700)], max_tokens=2) for n in range(3)]
            h.run()
            assert all(h.right(h.requests[rid]) for rid in ids)
        assert h.stat("dropped_evicted") > 10
        assert verdicts(h)[0] > 5
        assert verdicts(h)[1:] == (0, 0)
        h.assert_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_well_that_is_lost_during_a_canary(tmp_path: Path, ranks: int) -> None:
    with engine(tmp_path, extra=ALL, batch_tokens=64, ranks=ranks) as h:
        h.serve(prompt(300))
        for at in range(1, 8):
            h.forget()
            rid = h.add(prompt(300), max_tokens=4)
            for _ in range(at):
                h.step()
            lose(h)
            h.step()
            rejoin(h)
            h.run()
            assert h.right(h.requests[rid])
            h.assert_quiet()
        assert h.right(h.recall(prompt(300)))
        assert verdicts(h)[0] >= 1
        assert verdicts(h)[1:] == (0, 0)


def test_a_well_that_is_lost_before_the_pages_are_there(tmp_path: Path) -> None:
    with engine(tmp_path, extra=ALL) as h:
        h.serve(prompt(100))
        takes = h.half._canaries.takes

        def then_lose(*asked: Any) -> bool:
            taken = takes(*asked)
            lose(h)
            return taken

        with patch.object(h.half._canaries, "takes", then_lose):
            assert h.right(h.recall(prompt(100)))
        assert (h.counted("canaries"), h.counted("hook_errors")) == (0, 0)
        rejoin(h)
        h.serve(prompt(20, seed=2))
        h.assert_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_comparison_that_fails_on_one_rank_is_no_canary(tmp_path: Path, ranks: int) -> None:
    compare, calls = CpuCopies.errors, []

    def fails_first(self: CpuCopies, fresh: Any, stored: Any) -> list[float]:
        calls.append(fresh)
        if len(calls) == 1:
            raise RuntimeError("on purpose")
        return compare(self, fresh, stored)

    with engine(tmp_path, extra=ALL, ranks=ranks) as h:
        h.serve(prompt(100))
        with patch.object(CpuCopies, "errors", fails_first):
            assert h.right(h.recall(prompt(100)))
        assert calls and verdicts(h) == (0, 0, 0)
        h.assert_quiet()
        assert h.right(h.recall(prompt(100)))
        assert verdicts(h) == (1, 0, 0)


def test_two_engines_of_different_weights_and_one_name(tmp_path: Path) -> None:
    with open_well("32MiB") as well:
        setup = setup_in(tmp_path, extra=ALL)
        with Engine(setup, well) as one, Engine(setup_in(tmp_path, extra=ALL, weights=4), well) as two:
            for seed in range(3):
                one.serve(prompt(100, seed))
            for seed in range(2):
                assert two.right(two.serve(prompt(100, seed)))
            assert verdicts(one) == (0, 2, 1)
            assert one.right(one.recall(prompt(100)))
            assert one.stat("misses_quarantined") > 0, "nobody can tell who of the two is right"
            for each in (one, two):
                each.assert_quiet()


# the error ------------------------------------------------------------------------------------------------------------


def raw(values: Any, kind: str) -> np.ndarray:
    floats = np.asarray(values, np.float32)
    if kind == "bfloat16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return floats.astype(kind).view(np.uint8)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_the_error_is_that_of_the_numbers(kind: str) -> None:
    stored = np.array([3.0, 4.0, 0.0, 0.0])
    assert relative_error(raw(stored, kind), raw(stored, kind), kind) == 0
    assert relative_error(raw([3.0, 4.0, 0.5, 0.0], kind), raw(stored, kind), kind) == pytest.approx(0.1, rel=1e-3)
    assert relative_error(raw(-stored, kind), raw(stored, kind), kind) == pytest.approx(2, rel=1e-3)
    assert relative_error(raw(stored, kind), raw(0 * stored, kind), kind) == WORST
    odd = np.array([3.0, np.inf, np.nan, 4.0])
    assert relative_error(raw([3.0, np.inf, np.nan, 3.5], kind), raw(odd, kind), kind) == pytest.approx(0.1, rel=1e-3)
    assert relative_error(raw([3.0, 1.0, np.nan, 4.0], kind), raw(odd, kind), kind) == WORST
    assert relative_error(raw([1.0], "float32"), raw([1e-10], "float32"), "float32") == WORST, "and no more"
    for size in (1e-30, 1e20):  # whose squares are no float32
        small, other = raw([size, size], "float32"), raw([1.1 * size, 0.9 * size], "float32")
        assert relative_error(other, small, "float32") == pytest.approx(0.1, rel=1e-3)
    assert relative_error(raw([0.0], "float32"), raw([-0.0], "float32"), "float32") == 0
    with pytest.raises(KeyError):
        relative_error(np.zeros(4, np.uint8), np.ones(4, np.uint8), "uint8")
