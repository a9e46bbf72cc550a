"""What the benchmarks of decoding across tiers make of what they measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.bench.longctx import __main__ as program
from lab.bench.longctx import beyond, pipeline, verified, virtual
from lab.bench.longctx.anchors import hits, near, predicted
from lab.bench.longctx.anchors.trace import Chosen, Recorder, replay
from lab.bench.longctx.likeness import likeness
from lab.bench.longctx.parts import Parts
from lab.bench.longctx.pipeline import Steps, balance, balanced, hidden
from lab.bench.longctx.stage import Stage
from lab.bench.longctx.verified import TIE, Agreement, agreement
from lab.bench.longctx.virtual import Ask, Need
from stepwell.longctx import attach
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.parts.residency.lru import LruPages
from stepwell.longctx.parts.residency.window import StepWindow
from stepwell.longctx.parts.select.base import Candidates
from stepwell.longctx.parts.select.topk import TopK
from stepwell.longctx.store.link import ModelledLink
from tests.longctx.models import make, tokens

FAR, NEAR = 2 * TIE, TIE / 2


def test_equal_tokens_agree() -> None:
    def never(count: int) -> Sequence[int]:
        raise AssertionError(f"nothing parted, and {count} tokens were asked for again")

    assert agreement([1, 2, 3], [FAR] * 3, [1, 2, 3], never) == Agreement(3, 0, 0)


def test_a_place_where_they_part_is_a_tie_or_a_mismatch_and_it_goes_on_behind_it() -> None:
    full = [1, 2, 3, 4, 5, 6]
    asked = []

    def go_on(count: int) -> list[int]:
        asked.append(count)
        return {2: [3, 9, 9, 9], 4: [5, 6]}[count]

    found = agreement(full, [FAR, NEAR, FAR, FAR, FAR, FAR], [1, 7, 7, 7, 7, 7], go_on)
    assert found == Agreement(6, ties=1, mismatches=1)
    assert asked == [2, 4]


def test_the_last_token_may_differ() -> None:
    assert agreement([1, 2], [FAR, FAR], [1, 3], lambda count: pytest.fail("behind the end")) == Agreement(2, 0, 1)


def test_a_gap_of_exactly_the_bound_is_no_tie() -> None:
    assert agreement([1], [TIE], [2], lambda count: []).mismatches == 1


def test_likeness_of_known_distributions() -> None:
    reference = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    other = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    found = likeness(reference, other)
    assert found.worst == 3.0
    assert found.same_top1 == 0.5
    p, q = reference[1].double().softmax(0), other[1].double().softmax(0)
    assert found.kl.tolist() == pytest.approx([0.0, float((p * (p / q).log()).sum())])


def test_hidden_time() -> None:
    assert hidden(2.0, 0.5) == 0.75
    assert hidden(1.0, 3.0) == 0.0  # waiting includes what queued before it
    assert hidden(0.0, 0.0) == 1.0
    assert balance(100.0, 0.5) == 200.0


def test_what_fetching_takes_beside_the_link_counts_at_balance():
    tried = Steps(seconds=[1.0, 1.0], nbytes=200, fetch=0.6, stall=0.0, stalls=[], fetches=[])
    assert balanced(tried, 500.0, computing=0.2) == pytest.approx(1000.0), "0.1 s of 0.3 s are not the link's"
    assert balanced(tried, 500.0, computing=0.1) == pytest.approx(2000.0), "never nothing"


def test_hidden_time_is_judged_at_balance_only() -> None:
    for fetch, met in ((0.5, None), (1.0, True)):  # of a second of computing
        found = Steps([1.0] * 2, 200, 2 * fetch, 0.0, [0.0] * 2, [fetch] * 2)
        row = next(pipeline.judged("hidden", pipeline.HIDDEN, found, ModelledLink(100.0)))
        assert row.met is met and f"fetching takes {fetch:.2f} x" in row.beside
    assert next(pipeline.judged("hidden", None, found, ModelledLink(100.0))).measured is not None


def test_a_virtual_link_delays_the_model_by_what_is_not_there_yet() -> None:
    link = ModelledLink(100.0)
    alone = [Ask(0.0, 0, 100, urgent=True), Need(0.4, 0)]
    assert virtual.replay(alone, link) == virtual.Replayed(1.0, pytest.approx(0.6))
    assert virtual.replay([Ask(0.0, 0, 100, urgent=True), Need(1.5, 0)], link) == virtual.Replayed(1.0, 0.0)
    later = [*alone, Ask(0.5, 2, 100, urgent=True), Need(1.0, 2)]
    found = virtual.replay(later, link)
    assert found.stall == pytest.approx(0.6 + 0.5), "what comes later is delayed by all waiting before it"
    assert virtual.replay(alone, ModelledLink(100.0, latency=0.1)).stall == pytest.approx(0.7)


def test_urgent_requests_overtake_on_the_virtual_link_what_has_not_begun() -> None:
    early = [Ask(0.0, 0, 100, urgent=False), Ask(0.1, 1, 100, urgent=False), Ask(0.2, 2, 100, urgent=True)]
    assert virtual.replay([*early, Need(0.2, 2)], ModelledLink(100.0)).stall == pytest.approx(1.8)
    assert virtual.replay([*early, Need(0.2, 2), Need(0.3, 1)], ModelledLink(100.0)).fetch == pytest.approx(3.0)
    with pytest.raises(KeyError):
        virtual.replay([Need(0.0, 7)], ModelledLink(100.0))


def _candidates(score: torch.Tensor) -> Candidates:
    mass = score[:, None, None]
    return Candidates(mass, mass[..., 0], score, tokens=score.shape[1], page_tokens=1)


def test_what_is_recorded_is_what_was_selected_layer_by_layer() -> None:
    recorder = Recorder(TopK(0.5))
    asked = [torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])]
    for score in asked:
        recorder.select(_candidates(score))
    (step,) = recorder.steps(layers=2)
    assert step.selected.tolist() == [[True, True, False, False], [False, False, True, True]]
    assert torch.equal(step.score, torch.cat(asked))
    recorder.select(_candidates(asked[0]))
    with pytest.raises(ValueError, match="whole steps"):
        recorder.steps(layers=2)


def _steps(*selected: Sequence[int], pages: int = 4) -> list[Chosen]:
    found = []
    for numbers in selected:
        chosen = torch.zeros(1, pages, dtype=torch.bool)
        chosen[0, list(numbers)] = True
        found.append(Chosen(chosen, chosen.float()))
    return found


def test_replay_counts_what_was_there_when_it_was_wanted() -> None:
    steps = _steps([0, 1], [1, 2], [0, 2])
    assert _counts(replay(steps, LruPages(), slots=4)) == (3, 6)
    assert _counts(replay(steps, LruPages(), slots=4, after=1)) == (3, 4)
    assert _counts(replay(steps, StepWindow(1), slots=4)) == (2, 6), "page 0 has left the window"
    assert _counts(replay(steps, LruPages(), slots=1)) == (2, 6), "of each step the newer page stays"


def _counts(found: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    return int(found[0].sum()), int(found[1].sum())


def test_replay_takes_pages_that_come_on_the_way() -> None:
    steps = [*_steps([0], pages=1), *_steps([0, 2], pages=3), *_steps([2], pages=3)]
    assert _counts(replay(steps, LruPages(), slots=3)) == (2, 4)


def test_ours_is_judged_by_its_worst_pool() -> None:
    repeated = [[0, 1], [2, 3], [0, 1], [2, 3]] * 4
    record = hits.Record("made up", 0.125, _steps(*repeated))
    rows = hits.judged([record])
    of_lru = next(row for row in rows if "LRU" in row.what and "12.5" in row.what)
    assert of_lru.met is not None and of_lru.measured is not None
    assert all(row.measured is None for row in rows if "6.25" in row.what), "nothing was recorded for that budget"


def test_parts_are_taken_up_by_the_same_sources_and_sizes_only(tmp_path: Path) -> None:
    stage = Stage.begin(quick=True, kept=tmp_path)
    first = Parts.open(tmp_path, "some", "size 1", "abc")
    assert first.time_for("batch", stage)
    first.add("batch 0", {"tokens": 3}, stage)
    assert Parts.open(tmp_path, "some", "size 1", "abc")["batch 0"] == {"tokens": 3}
    assert "batch 0" not in Parts.open(tmp_path, "some", "size 2", "abc")
    assert "batch 0" not in Parts.open(tmp_path, "some", "size 1", "def")
    assert "batch 0" not in Parts.open(tmp_path, "some", "size 1", "abc-changed")
    assert "batch 0" not in Parts.open(None, "some", "size 1", "abc")
    (tmp_path / "some.parts.json").write_text("{")
    assert "batch 0" not in Parts.open(tmp_path, "some", "size 1", "abc")


def test_no_part_is_begun_that_does_not_fit_into_the_time(tmp_path: Path) -> None:
    long, over = Stage.begin(True, None, 1000.0), Stage.begin(True, None, 0.0)
    parts = Parts.open(None, "some", "size", "abc")
    assert not parts.time_for("batch", over)
    assert parts.time_for("batch", long)
    parts.add("batch 0", {}, Stage.begin(True, None, 400.0))  # it took 600 s
    assert not parts.time_for("batch", Stage.begin(True, None, 500.0))
    assert parts.time_for("other", Stage.begin(True, None, 500.0))


def test_agreement_is_summed_over_batches() -> None:
    done = [{"tokens": 6000.0, "ties": 1.0, "mismatches": 0.0}, {"tokens": 6000.0, "ties": 0.0, "mismatches": 2.0}]
    differ, compared, ties = verified.agreement_rows(done)
    assert differ.measured is not None and differ.measured.value == 2 and differ.met is False
    assert compared.met is True
    assert ties.measured is not None and ties.measured.value == 1
    assert [row.met for row in verified.agreement_rows([])] == [None]


def test_accuracy_of_the_ways_is_compared_by_document() -> None:
    one = {"digits": 500.0, "steps": 900.0, "right, full attention": 500.0}
    for name, right in (
        (predicted.OURS, 450.0),
        (predicted.ACTUAL, 500.0),
        (predicted.SELECTS, 400.0),
        (predicted.SCOUT, 300.0),
    ):
        one |= {f"right, {name}": right, f"KL, {name}": 2.0, f"selected, {name}": 0.125}
    gained, waited, by_math, *_ = predicted.rows([one, one])
    assert gained.met is True and waited.target is None, "judged at equal overlap"
    for row, points in ((gained, 30.0), (waited, 40.0), (by_math, 20.0)):
        assert row.measured is not None and row.measured.value == pytest.approx(points)
    few, so_far, *_ = predicted.rows([one])
    assert few.met is None and "500 digits" in few.beside
    assert so_far.measured is not None and so_far.target is None
    assert predicted.rows([])[0].measured is None


def test_a_part_of_the_suite_judges_no_mean_of_it() -> None:
    size = replace(verified.QUICK, alone=("nat", "kvtable"))
    one = {"exact bytes": 100.0}
    for budget in verified.BUDGETS:
        one |= {f"{name} {budget:g}": 10.0 for name in ("accepted", "drafted", "bytes")} | {f"checks {budget:g}": 1.0}
    parts = Parts.open(None, "some", "size", "abc")
    for task, met in (("nat", None), ("kvtable", True)):
        parts.add(f"alone {task}", one, Stage.begin(True, None))
        assert {row.met for row in verified.alone_rows(parts, size)[:2]} == {met}


def test_ours_overlaps_as_scouts_does() -> None:
    ways = predicted.ways()
    ours, scout = ways[predicted.OURS], ways[predicted.SCOUT]
    assert (ours.prefetch, ours.late_mass, ours.query, ours.predicted_math) == (True, 1.0, "actual", False)
    of = ("index", "selector", "residency", "page_tokens", "codec", "joint", "lookahead")
    assert all(getattr(ours, name) == getattr(scout, name) for name in of), "nothing else differs"


def test_what_crosses_for_scoring_is_counted_both_ways_and_nothing_else() -> None:
    ledger = Ledger()
    ledger.moved("hot", "cold", "score", 3)
    ledger.moved("cold", "hot", "score", 4)
    ledger.moved("hot", "cold", "index", 100)
    assert near.crossed(ledger) == 7


def test_hot_tokens_are_counted_where_they_are() -> None:
    model, ids = make(), tokens(600)
    for policy in ("stepwell", "exact"):
        with attach(model, policy, hot_tokens=300) as attached:
            cache = attached.new_cache()
            clock = beyond.Clock(cache)
            model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, streamer=clock)
            assert len(clock.times) == 4
            assert 100 < clock.hot <= 300
            cache.close()
    assert beyond.hot_tokens(cache) == 0


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["nothing"])
    assert "no benchmark is called nothing" in capsys.readouterr().err
