"""What was measured of the systems, and how it becomes rows. Pure.

Every sample has its partner in the limit's run of the same repetition, kind and document: a ratio of two such times is
free of the document's length and, nearly, of the machine's changing speed. Medians of these ratios are judged; beside
them stands a steadier number for a noisy machine, each document's fastest repetition over the limit's fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from lab.bench.compared.systems import DISK, HOST, LIMIT, ON_DISK, SYSTEMS, TIER, VLLM_CPU, VLLM_FS
from lab.bench.report import Row, Target
from stepwell.demo.results import stats
from stepwell.demo.results.measure import ratio
from stepwell.demo.results.stats import Estimate


class Kind(StrEnum):
    """How a request was asked."""

    ALONE = "one at a time"
    FIRST = "one at a time, one token"
    TOGETHER = "several at a time"
    RESTARTED = "after a restart of everything"
    EXACT = "exact repeats of a whole number of pages"
    TURN = "next turns of a conversation"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. `cacheable` are the prompt's tokens in whole pages; `itl_s` is the mean time between its tokens, None
    of one token; `cpu_s` is None where it was not counted, `copy_s`, of the recall, where no receipt says it; `answer`
    are its tokens."""

    system: str
    page: int
    repetition: int
    kind: Kind
    document: int
    ttft_s: float
    cacheable: int
    cached: int
    answer: tuple[int, ...]
    itl_s: float | None = None
    cpu_s: float | None = None
    copy_s: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """What a system had the device read for requests one at a time of one repetition, and the KV that it was given."""

    system: str
    page: int
    read_bytes: int
    kv_bytes: int


ALONE_TARGETS = {128: 1.25, 32: 1.45}
"""Of the disk over an engine hit, by tokens of an engine page."""
TOGETHER_P50, TOGETHER_P95, HITS_AFTER_RESTART = 1.65, 1.6, 0.98
OVER_PEER, OVER_FLOOR, HITS = 1.0, 1.08, 1.0
"""Of host and disk over vLLM's tiers; of host over an engine hit, and of the disk over a hit and a bare read; of blocks
while nobody is killed."""

BARE = "limit and a bare read"
"""The limit, after each of whose hits as many bytes are read from a bare file, as if it were a system of its own."""

TIER_OVER_FS, TIER_CPU_OVER_FS = 1.05, 1.15
"""Of a well below vLLM's offloading over vLLM's own filesystem tier: time, and CPU seconds to the first token."""

Value = Callable[[Sample], float | None]


def order(names: Sequence[str], repetition: int) -> list[str]:
    """Rotated by one in each repetition, so that each system comes first, and last, equally often."""
    at = repetition % len(names)
    return [*names[at:], *names[:at]]


def rows(samples: Sequence[Sample], reads: Sequence[Read], page: int) -> list[Row]:
    """All rows of this page size, of the systems that were measured; comparisons with one that was not are left out."""
    there = [sample for sample in samples if sample.page == page]
    names = [name for name in SYSTEMS if any(sample.system == name for sample in there)]
    found: list[Row] = []
    for name in names:
        found += _of_system(there, reads, name, page)
    found += _between(there, HOST, VLLM_CPU, page, Target("<=", OVER_PEER))
    found += _between(there, DISK, VLLM_FS, page, Target("<=", OVER_PEER))
    found += _between(there, DISK, BARE, page, Target("<=", OVER_FLOOR))
    found += _between(there, TIER, VLLM_FS, page, Target("<=", TIER_OVER_FS))
    found += _cpu_between(there, TIER, VLLM_FS, page)
    return found


def paired(samples: Iterable[Sample], name: str, other: str, kind: Kind, value: Value) -> list[float]:
    """Ratios of `value`, this system's over the other's of the same repetition and document."""
    chosen = _chosen(samples, kind, value)
    return [
        found / chosen[other, repetition, document]
        for (system, repetition, document), found in chosen.items()
        if system == name and (other, repetition, document) in chosen
    ]


def best_over_best(samples: Iterable[Sample], name: str, other: str, kind: Kind, value: Value) -> list[float]:
    """One ratio a document: this system's smallest value of all repetitions over the other's smallest."""
    least: dict[tuple[str, int], float] = {}
    for (system, _, document), found in _chosen(samples, kind, value).items():
        least[system, document] = min(found, least.get((system, document), found))
    return [
        found / least[other, document]
        for (system, document), found in least.items()
        if system == name and (other, document) in least
    ]


def hit_share(samples: Iterable[Sample]) -> float | None:
    """Cached tokens over the tokens that whole pages could hold; None for no samples."""
    chosen = list(samples)
    cacheable = sum(sample.cacheable for sample in chosen)
    return sum(sample.cached for sample in chosen) / cacheable if cacheable else None


def identical(samples: Sequence[Sample], name: str, kind: Kind) -> tuple[int, int]:
    """How many answers equal the limit's of the same repetition and document, and how many have one."""
    asked = {
        (sample.repetition, sample.document): sample.answer
        for sample in samples
        if sample.system == LIMIT and sample.kind is kind
    }
    pairs = [
        sample.answer == asked[sample.repetition, sample.document]
        for sample in samples
        if sample.system == name and sample.kind is kind and (sample.repetition, sample.document) in asked
    ]
    return sum(pairs), len(pairs)


def ttft(sample: Sample) -> float:
    return sample.ttft_s


def over(samples: Sequence[Sample], name: str, other: str, kind: Kind, what: str, target: Target | None) -> Row:
    """This system's times over the other's, in pairs."""
    values = ratio(paired(samples, name, other, kind, ttft))
    if values is None:
        return Row(what, "", None, target, "no sample has a partner")
    best = median(best_over_best(samples, name, other, kind, ttft))
    estimate = Estimate(values.median, values.low, values.high, values.count)
    return Row(what, "", estimate, target, f"best of repetitions {best:.3f}")


def _chosen(samples: Iterable[Sample], kind: Kind, value: Value) -> dict[tuple[str, int, int], float]:
    chosen = {}
    for sample in samples:
        if sample.kind is kind and (found := value(sample)) is not None:
            chosen[sample.system, sample.repetition, sample.document] = found
    return chosen


def _values(samples: Iterable[Sample], name: str, kind: Kind, value: Value) -> list[float]:
    return [found for (system, _, _), found in _chosen(samples, kind, value).items() if system == name]


def _of_system(samples: Sequence[Sample], reads: Sequence[Read], name: str, page: int) -> list[Row]:
    where = f"{name}, page {page}"
    alone = _values(samples, name, Kind.ALONE, ttft)
    found: list[Row] = []
    if name != LIMIT:
        bound = OVER_FLOOR if name == HOST else ALONE_TARGETS.get(page) if name == DISK else None
        target = Target("<=", bound) if bound is not None else None
        found.append(over(samples, name, LIMIT, Kind.ALONE, f"{where}: TTFT over the limit's", target))
    found += spread("  TTFT" if name != LIMIT else f"{where}: TTFT", alone, _hits(samples, name, Kind.ALONE))
    found += _all_hit(samples, name, Kind.ALONE)
    found += _copied(samples, name)
    for what, unit, scale, kind, value in (
        ("  CPU to the first token", "ms", 1e3, Kind.FIRST, lambda sample: sample.cpu_s),
        ("  between tokens", "ms", 1e3, Kind.ALONE, lambda sample: sample.itl_s),
    ):
        values = _values(samples, name, kind, value)
        if values:
            beside = _beside_limit(samples, name, kind, value)
            found.append(Row(what, unit, stats.median(values).times(scale), None, beside))
    found += _together(samples, name, where)
    found += _from_device(reads, name, page)
    found += _restarted(samples, name, where)
    return found


def _together(samples: Sequence[Sample], name: str, where: str) -> list[Row]:
    mine, limit = (_values(samples, system, Kind.TOGETHER, ttft) for system in (name, LIMIT))
    found: list[Row] = []
    for percent, bound in ((50, TOGETHER_P50), (95, TOGETHER_P95)):
        if name != LIMIT and mine and limit:
            target = Target("<=", bound) if name == DISK else None
            estimate = stats.ratio_of_percentiles(mine, limit, percent)
            found.append(Row(f"{where}, several at a time: TTFT over the limit's, p{percent}", "", estimate, target))
    found += spread("  several at a time: TTFT", mine, _hits(samples, name, Kind.TOGETHER))
    return found + _all_hit(samples, name, Kind.TOGETHER)


def _all_hit(samples: Sequence[Sample], name: str, kind: Kind) -> list[Row]:
    """Of the disk, which is judged by it."""
    chosen = [sample for sample in samples if (sample.system, sample.kind) == (DISK, kind)]
    share = hit_share(chosen)
    if name != DISK or share is None:
        return []
    target = Target(">=", HITS)
    return [Row(f"  {kind}: blocks hit", "", Estimate(share, share, share, len(chosen)), target)]


def _copied(samples: Sequence[Sample], name: str) -> list[Row]:
    """The copy itself, as receipts tell it, and which part of an engine hit's time it would be."""
    copied = _values(samples, name, Kind.ALONE, lambda sample: sample.copy_s)
    if not copied:
        return []
    beside = paired(
        samples, name, LIMIT, Kind.ALONE, lambda sample: sample.ttft_s if sample.system == LIMIT else sample.copy_s
    )
    share = f"{median(beside):.3f} of the limit's TTFT" if beside else ""
    return [Row("  of it the copy itself", "ms", stats.median(copied).times(1e3), None, share)]


def _from_device(reads: Sequence[Read], name: str, page: int) -> list[Row]:
    shares = [
        read.read_bytes / read.kv_bytes for read in reads if (read.system, read.page) == (name, page) and read.kv_bytes
    ]
    if name not in ON_DISK or not shares:
        return []
    return [Row("  read from the device, of the KV recalled (one at a time)", "", stats.median(shares))]


def _restarted(samples: Sequence[Sample], name: str, where: str) -> list[Row]:
    chosen = [sample for sample in samples if sample.system == name and sample.kind is Kind.RESTARTED]
    share = hit_share(chosen)
    if share is None:
        return []
    target = Target(">=", HITS_AFTER_RESTART) if name == DISK else None
    limit: dict[int, list[float]] = {}
    for sample in samples:
        if sample.system == LIMIT and sample.kind is Kind.ALONE:
            limit.setdefault(sample.document, []).append(sample.ttft_s)
    over = ratio([sample.ttft_s / median(limit[sample.document]) for sample in chosen if sample.document in limit])
    found = [
        Row(
            f"{where}, {Kind.RESTARTED}: blocks hit, of those that were written",
            "",
            Estimate(share, share, share, len(chosen)),
            target,
        )
    ]
    if over is not None:
        estimate = Estimate(over.median, over.low, over.high, over.count)
        found.append(Row("  TTFT over the limit's median of the same document", "", estimate))
    return found


def _between(samples: Sequence[Sample], name: str, other: str, page: int, target: Target) -> list[Row]:
    where = f"{name} over {other}, page {page}"
    there = {sample.system for sample in samples}
    if not {name, other} <= there:
        return []
    found = [over(samples, name, other, Kind.ALONE, f"{where}: TTFT", target)]
    mine, theirs = (_values(samples, system, Kind.TOGETHER, ttft) for system in (name, other))
    if mine and theirs:
        for percent in (50, 95):
            estimate = stats.ratio_of_percentiles(mine, theirs, percent)
            judged = target if name in ON_DISK else None
            found.append(Row(f"{where}, several at a time: TTFT, p{percent}", "", estimate, judged))
    return found


def _cpu_between(samples: Sequence[Sample], name: str, other: str, page: int) -> list[Row]:
    values = ratio(paired(samples, name, other, Kind.FIRST, lambda sample: sample.cpu_s))
    if values is None:
        return []
    estimate = Estimate(values.median, values.low, values.high, values.count)
    what = f"{name} over {other}, page {page}: CPU to the first token"
    return [Row(what, "", estimate, Target("<=", TIER_CPU_OVER_FS))]


def spread(what: str, seconds: Sequence[float], beside: str) -> list[Row]:
    """p50 and p95 in milliseconds."""
    if not seconds:
        return []
    return [
        Row(f"{what}, p50", "ms", stats.median(seconds).times(1e3), None, beside),
        Row(f"{what}, p95", "ms", stats.percentile(seconds, 95).times(1e3)),
    ]


def _hits(samples: Sequence[Sample], name: str, kind: Kind) -> str:
    chosen = [sample for sample in samples if sample.system == name and sample.kind is kind]
    share = hit_share(chosen)
    if share is None:
        return ""
    same, of = identical(samples, name, kind)
    answers = "" if name == LIMIT else f"; {same} of {of} answers are the limit's"
    return f"{100 * share:.1f} % hits, worst request {100 * min(s.cached / s.cacheable for s in chosen):.0f} %{answers}"


def _beside_limit(samples: Sequence[Sample], name: str, kind: Kind, value: Value) -> str:
    ratios = [] if name == LIMIT else paired(samples, name, LIMIT, kind, value)
    return f"{median(ratios):.3f} of the limit's" if ratios else ""
