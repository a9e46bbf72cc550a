"""Metrics against what is known of them, and intervals against a distribution that is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stepwell.fidelity.document import Document, Field
from stepwell.fidelity.results import bootstrap
from stepwell.fidelity.results.metrics import compare, summarise

STEPS, VOCABULARY = 100, 50
FIELDS = (Field("digits", "a", 3, 5, ""), Field("digits", "b", 10, 13, ""))


def document(seed: int = 0, fields: tuple[Field, ...] = FIELDS) -> Document:
    random = np.random.default_rng(seed)
    return Document((1, 2, 3), tuple(random.integers(0, VOCABULARY, STEPS).tolist()), fields, 2)


def logits(seed: int) -> torch.Tensor:
    return torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def test_full_beside_itself_is_the_same() -> None:
    found = compare(document(), logits(0), logits(0))
    assert found.kl.max() == 0 and found.same_top1.all() and (found.dnll == 0).all()
    summary = summarise([found])
    assert (summary.kl.value, summary.kl_max, summary.top1.value, summary.field_difference.value) == (0, 0, 1, 0)


def test_logits_are_only_compared_up_to_a_constant() -> None:
    found = compare(document(), logits(0), logits(0) + 100)
    assert found.kl.max() < 1e-5 and found.same_top1.all()


def test_kl_and_dnll_are_those_of_the_definition() -> None:
    one = document()
    full, policy = logits(0), logits(1)
    found = compare(one, full, policy)
    p, q = full.double().softmax(-1), policy.double().softmax(-1)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).numpy())
    gold = torch.tensor(one.continuation)
    nll = [-each[torch.arange(STEPS), gold].log() for each in (p, q)]
    assert found.dnll == pytest.approx((nll[1] - nll[0]).numpy())
    assert (found.kl > 0).all()


def test_an_impossible_token_adds_nothing() -> None:
    full, policy = logits(0), logits(0)
    full[:, 7] = policy[:, 7] = -torch.inf
    one = Document((1, 2), (3,) * STEPS, FIELDS, 2)
    assert compare(one, full, policy).kl.max() == 0


def test_fields_are_counted_by_token_and_whole() -> None:
    one = document()
    full = torch.nn.functional.one_hot(torch.tensor(one.continuation), VOCABULARY).float()
    policy = full.clone()
    policy[4] = policy[4].roll(1)  # the second token of the first field
    policy[60] = policy[60].roll(1)  # no field's
    summary = summarise([compare(one, full, policy)])
    assert summary.digits == 5
    assert (summary.field_accuracy.value, summary.full_field_accuracy.value) == (0.8, 1.0)
    assert summary.field_difference.value == pytest.approx(-0.2)
    assert (summary.whole_fields, summary.full_whole_fields) == (0.5, 1.0)
    assert summary.top1.value == 0.98


def test_without_fields_every_token_counts() -> None:
    one = document(fields=())
    full = torch.nn.functional.one_hot(torch.tensor(one.continuation), VOCABULARY).float()
    summary = summarise([compare(one, full, full.roll(1, 0))])
    assert (summary.digits, summary.whole_fields) == (0, None)
    assert summary.full_field_accuracy.value == 1.0 and summary.field_accuracy.value < 0.2


def test_documents_are_pooled_by_their_tokens() -> None:
    estimate = bootstrap.ratio([10.0, 0.0], [10, 30])
    assert estimate.value == 0.25 and (estimate.low, estimate.high) == (0.0, 1.0)
    assert bootstrap.ratio([10.0, 0.0], [10, 30], seed=3) == bootstrap.ratio([10.0, 0.0], [10, 30], seed=3)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        bootstrap.ratio([], [])
    with pytest.raises(ValueError, match="cannot be paired"):
        bootstrap.difference(([1.0], [1]), ([1.0, 1.0], [1, 1]))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Documents with effects of their own on all their tokens: intervals that took tokens for independent would cover
    in less than half of the cases."""
    random = np.random.default_rng(0)
    trials, documents, tokens, truth = 200, 15, 80, 0.6
    covered = 0
    for trial in range(trials):
        rates = np.clip(truth + 0.15 * random.standard_normal(documents), 0, 1)
        sums = random.binomial(tokens, rates).astype(float)
        estimate = bootstrap.ratio(list(sums), [tokens] * documents, seed=trial)
        covered += estimate.low <= truth <= estimate.high
    assert 0.86 <= covered / trials <= 0.99


def test_pairing_takes_out_what_documents_have_in_common() -> None:
    random = np.random.default_rng(1)
    hard = random.uniform(0, 50, 20)
    worse, better = list(hard), list(hard + 1 + random.uniform(-0.2, 0.2, 20))
    counts = [80] * 20
    paired = bootstrap.difference((better, counts), (worse, counts))
    alone = bootstrap.ratio(better, counts)
    assert paired.low > 0 and paired.high - paired.low < (alone.high - alone.low) / 20
    assert bootstrap.difference((worse, counts), (worse, counts)).high == 0
