"""The row of results, as `--json` prints it: the first fifteen fields are a contract, the others may grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepwell.fidelity.results.metrics import Compared, summarise
from stepwell.fidelity.runner import Moved

DIGITS = 1000
"""Tokens of facts: fewer are no evidence for a point."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class FidelityPoint:
    """Key of a row. `budget`: share of the context that may be selected in a step. `tokens`: requested length of the
    prompts; `intensity`: facts that each continuation needs. Both are 0 where documents differ."""

    task: str
    policy: str
    tier: str
    granularity: str
    budget: float
    tokens: int
    intensity: int = 0
    blind: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """Documents that were run side by side under one policy."""

    prompt_tokens: int
    compared: Sequence[Compared]
    moved: Moved
    seconds: float


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """`digits`: how many tokens of facts were scored. Without any (natural text) field accuracies are those of every
    next token. Moved bytes, scales included, are of all steps of all documents together, in all layers;
    `bytes_all_fp16`: what fetching K and V of all cold tokens in fp16 in each of these steps would have moved.
    `index_bytes` and `hot_bytes` are of one document's cache, on average. `tokens` is the length of the prompts: as it
    was asked for, or on average where documents are a user's own. `_ci`: 95 % intervals, documents resampled.
    """

    task: str
    policy: str
    tier: str
    granularity: str
    budget: float
    tokens: int
    digits: int
    kl_mean: float
    top1: float
    field_accuracy: float
    full_field_accuracy: float
    bytes_cold_to_hot: int
    bytes_all_fp16: int
    index_bytes: int
    hot_bytes: int
    kl_p99: float
    kl_max: float
    dnll: float
    kl_mean_ci: Interval
    top1_ci: Interval
    dnll_ci: Interval
    field_accuracy_ci: Interval
    field_difference: float
    field_difference_ci: Interval
    whole_fields: float | None
    full_whole_fields: float | None
    hit_rate: float
    selected_share: float
    fetched_share: float
    uncovered_mass: float
    true_uncovered_mass: float
    steps: int
    moved_steps: int
    documents: int
    seeds: int
    seconds: float
    intensity: int
    blind: bool

    @property
    def bytes_a_step(self) -> float:
        """Bytes fetched in a step, for one document."""
        return self.bytes_cold_to_hot / self.moved_steps

    @property
    def times_less(self) -> float | None:
        """Bytes that fetching everything would have moved, over those that were moved; None where nothing was."""
        return self.bytes_all_fp16 / self.bytes_cold_to_hot if self.bytes_cold_to_hot else None


def row(point: FidelityPoint, found: Sequence[Measured], seeds: int) -> FidelityRow:
    """Raises ValueError for no documents."""
    summary = summarise([compared for one in found for compared in one.compared])
    moved = [one.moved for one in found]
    counts = [len(one.compared) for one in found]

    def mean(values: Iterable[float]) -> float:
        """Mean over documents, or over batches of them."""
        return sum(count * value for count, value in zip(counts, values, strict=True)) / sum(counts)

    estimates = (summary.kl, summary.top1, summary.dnll, summary.field_accuracy)
    kl_ci, top1_ci, dnll_ci, field_ci = ((of.low, of.high) for of in estimates)
    return FidelityRow(
        task=point.task,
        policy=point.policy,
        tier=point.tier,
        granularity=point.granularity,
        budget=point.budget,
        tokens=point.tokens or round(mean(one.prompt_tokens for one in found)),
        digits=summary.digits,
        kl_mean=summary.kl.value,
        top1=summary.top1.value,
        field_accuracy=summary.field_accuracy.value,
        full_field_accuracy=summary.full_field_accuracy.value,
        bytes_cold_to_hot=sum(one.bytes_cold_to_hot for one in moved),
        bytes_all_fp16=sum(one.bytes_all_fp16 for one in moved),
        index_bytes=round(sum(one.index_bytes for one in moved) / sum(counts)),
        hot_bytes=round(sum(one.hot_bytes for one in moved) / sum(counts)),
        kl_p99=summary.kl_p99,
        kl_max=summary.kl_max,
        dnll=summary.dnll.value,
        kl_mean_ci=kl_ci,
        top1_ci=top1_ci,
        dnll_ci=dnll_ci,
        field_accuracy_ci=field_ci,
        field_difference=summary.field_difference.value,
        field_difference_ci=(summary.field_difference.low, summary.field_difference.high),
        whole_fields=summary.whole_fields,
        full_whole_fields=summary.full_whole_fields,
        hit_rate=mean(one.hit_rate for one in moved),
        selected_share=mean(one.selected_share for one in moved),
        fetched_share=mean(one.fetched_share for one in moved),
        uncovered_mass=mean(one.uncovered_mass for one in moved),
        true_uncovered_mass=mean(one.true_uncovered_mass for one in moved),
        steps=summary.tokens,
        moved_steps=sum(one.steps for one in moved),
        documents=summary.documents,
        seeds=seeds,
        seconds=round(sum(one.seconds for one in found), 1),
        intensity=point.intensity,
        blind=point.blind,
    )
