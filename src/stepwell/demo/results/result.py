"""The demo's result: flat, frozen, what `--json` prints.

Times are medians in seconds, ratios medians of paired ratios (None where nothing could be measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from stepwell.demo.results.measure import Drop, Pair, Ratio, counted, drops, middle, ratio, ratios
from stepwell.demo.wire import Answer


@dataclass(frozen=True, slots=True)
class Samples:
    """Every answer of a run, in the order asked. `cold[i]` and `first_hits[i]` belong to document i."""

    cold: Sequence[Answer]
    first_hits: Sequence[Answer]
    host: Sequence[Pair]
    restart: Sequence[Pair]
    disk: Sequence[Pair] = ()


@dataclass(frozen=True, slots=True)
class DemoResult:
    """`*_ttft_s` are medians; `*_speedup` is cold over that source, median over answers, per document.

    `host_*`: recalled by the engine that spilled. `restart_*`: recalled by an engine that was started after the first
    one was killed; `restart_first_ttft_s` is each document's first recall there. `disk_*`: recalled after engine and
    well were killed and the page cache was dropped; `disk_bytes` of blocks were on disk. Tokens are counted by vLLM;
    `recalled_token_bytes` are the well's for each of those that the first engine recalled. The pool is the engine's;
    where it keeps no prefix itself, recalls are compared with cold answers, and no ratio is known.
    """

    model: str
    engine: str
    documents: int
    document_tokens: int
    page: int
    pool_pages: int
    keeps_prefixes: bool
    rounds: int
    cold_ttft_s: float | None
    engine_hit_ttft_s: float | None
    host_recall_ttft_s: float | None
    restart_recall_ttft_s: float | None
    restart_first_ttft_s: float | None
    restart_hit_ttft_s: float | None
    host_ratio: float | None
    host_ratio_ci: tuple[float, float] | None
    restart_ratio: float | None
    restart_ratio_ci: tuple[float, float] | None
    disk_recall_ttft_s: float | None
    disk_hit_ttft_s: float | None
    disk_ratio: float | None
    disk_ratio_ci: tuple[float, float] | None
    engine_hit_speedup: float | None
    host_speedup: float | None
    restart_speedup: float | None
    disk_speedup: float | None
    identical: bool | None
    pairs: int
    host_pairs: int
    restart_pairs: int
    disk_pairs: int
    dropped_pairs: int
    dropped_not_recalled: int
    dropped_partly_local: int
    dropped_hit_not_local: int
    dropped_unequal: int
    dropped_not_from_disk: int
    recalled_tokens: int
    recalled_token_bytes: float | None
    host_bytes: int | None
    disk_bytes: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        """True if blocks were recalled before and after each restart, and always with the engine hit's answer."""
        recalled = self.host_pairs > 0 and self.restart_pairs > 0 and (self.disk_pairs > 0 or self.disk_bytes is None)
        return self.identical is True and recalled


@dataclass(frozen=True, slots=True)
class DemoSetting:
    """Conditions of the run, beside the samples."""

    model: str
    engine: str
    documents: int
    document_tokens: int
    page: int
    pool_pages: int
    rounds: int
    host_bytes: int | None
    seconds: float
    disk_bytes: int | None = None
    recalled_token_bytes: float | None = None
    keeps_prefixes: bool = True


def summarise(setting: DemoSetting, samples: Samples) -> DemoResult:
    if not setting.keeps_prefixes:
        samples = _beside_cold(samples)
    host, restart, disk = counted(samples.host), counted(samples.restart), counted(samples.disk)
    every = [*samples.host, *samples.restart, *samples.disk]
    dropped = drops(every)
    hits = [(document, hit) for document, hit in enumerate(samples.first_hits) if hit.local_tokens]
    hits += [(pair.document, pair.hit) for pair in host if not pair.computed]
    first: dict[int, Answer] = {}
    for pair in restart:
        first.setdefault(pair.document, pair.recall)
    host_ratio, restart_ratio, disk_ratio = (ratio(ratios(pairs)) for pairs in (host, restart, disk))

    def speedup(answers: Sequence[tuple[int, Answer]]) -> float | None:
        return middle([samples.cold[document].ttft_s / answer.ttft_s for document, answer in answers])

    return DemoResult(
        **asdict(setting),
        cold_ttft_s=_ttft(samples.cold),
        engine_hit_ttft_s=_ttft([hit for _, hit in hits]),
        host_recall_ttft_s=_ttft([p.recall for p in host]),
        restart_recall_ttft_s=_ttft([p.recall for p in restart]),
        restart_first_ttft_s=_ttft(list(first.values())),
        restart_hit_ttft_s=_ttft([p.hit for p in restart if not p.computed]),
        disk_recall_ttft_s=_ttft([p.recall for p in disk]),
        disk_hit_ttft_s=_ttft([p.hit for p in disk if not p.computed]),
        disk_ratio=disk_ratio.median if disk_ratio else None,
        disk_ratio_ci=_interval(disk_ratio),
        host_ratio=host_ratio.median if host_ratio else None,
        host_ratio_ci=_interval(host_ratio),
        restart_ratio=restart_ratio.median if restart_ratio else None,
        restart_ratio_ci=_interval(restart_ratio),
        engine_hit_speedup=speedup(hits),
        host_speedup=speedup([(p.document, p.recall) for p in host]),
        restart_speedup=speedup([(p.document, p.recall) for p in restart]),
        disk_speedup=speedup([(p.document, p.recall) for p in disk]),
        identical=all(p.identical for p in (*host, *restart, *disk)) if host or restart or disk else None,
        pairs=len(host) + len(restart) + len(disk),
        host_pairs=len(host),
        restart_pairs=len(restart),
        disk_pairs=len(disk),
        dropped_pairs=sum(dropped.values()),
        dropped_not_recalled=dropped.get(Drop.NOT_RECALLED, 0),
        dropped_partly_local=dropped.get(Drop.PARTLY_LOCAL, 0),
        dropped_hit_not_local=dropped.get(Drop.HIT_NOT_LOCAL, 0),
        dropped_unequal=dropped.get(Drop.UNEQUAL, 0),
        dropped_not_from_disk=dropped.get(Drop.NOT_FROM_DISK, 0),
        recalled_tokens=sum(p.recall.external_tokens or 0 for p in every),
    )


def _beside_cold(samples: Samples) -> Samples:
    """The same recalls, each beside its own document's cold answer."""

    def beside(pairs: Sequence[Pair]) -> list[Pair]:
        return [replace(pair, hit=samples.cold[pair.document], computed=True) for pair in pairs]

    return replace(samples, host=beside(samples.host), restart=beside(samples.restart), disk=beside(samples.disk))


def _ttft(answers: Sequence[Answer]) -> float | None:
    return middle([answer.ttft_s for answer in answers])


def _interval(value: Ratio | None) -> tuple[float, float] | None:
    return (value.low, value.high) if value is not None else None
