"""The well's metrics, and the figures of its `stats` that they show: one table for the endpoint, the docs and a test.

Conventions are Prometheus's: base units, `_total` on counters, no colons. Labels are few and hold words from lists of
ours, never tenants, models or prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stepwell import renamed
from stepwell.block.tier import Figures, WellStats
from stepwell.serve.metrics.exposition import Kind, MetricFamily, Sample

LABELS = frozenset({"tier", "op", "outcome", "reason", "kind", "source", "engine"})
"""All labels that may be used; `version` besides, of the one metric that shows it."""

MAX_LABEL_VALUES = 64
"""Samples of one prefix: some names come from engines."""


@dataclass(frozen=True, slots=True)
class StatSource:
    """The figure of `stats` that a metric's samples show, by its name `key`. If that ends in `*`, all figures whose
    names begin so and that no source names in full; `rest` is then the label that holds the rest of the name, or "" for
    one sample of their sum. Of a figure that is text, `rest` is the label that holds the text, and the sample is 1.
    With `below` it is a figure of each tier below the host tier, and its samples have the label `tier`."""

    key: str
    labels: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""
    below: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    help: str
    sources: tuple[StatSource, ...]

    @property
    def kind(self) -> Kind:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def labels(self) -> list[str]:
        found = {name for source in self.sources for name in (*source.labels, source.rest) if name}
        return sorted(found | ({"tier"} if any(source.below for source in self.sources) else set()))


def _below(key: str, labels: Mapping[str, str] = {}, rest: str = "") -> StatSource:
    return StatSource(key, labels, rest, below=True)


def _metric(name: str, help: str, *sources: StatSource) -> Metric:
    return Metric(name, help, sources)


_HOST = {"tier": "host"}
_RECALL, _SPILL = {"op": "recall"}, {"op": "spill"}

METRICS = (
    _metric(
        "stepwell_build_info", "Always 1; the version of the well that answered.", StatSource("well", rest="version")
    ),
    _metric("stepwell_uptime_seconds", "Time since the well started.", StatSource("uptime_s")),
    _metric("stepwell_connected_engines", "Engines that are connected.", StatSource("sessions")),
    _metric(
        "stepwell_disconnected_engines_total", "Engines that have left or were lost.", StatSource("sessions_ended")
    ),
    _metric("stepwell_requests_total", "Requests whose prefix was looked up.", StatSource("requests")),
    _metric(
        "stepwell_block_lookups_total",
        "Blocks of looked-up prefixes: offered to the engine (hit), or from where the run ended on (miss).",
        StatSource("hits", {"outcome": "hit"}),
        StatSource("misses_*", {"outcome": "miss"}),
    ),
    _metric(
        "stepwell_tail_requests_total",
        "Questions for the window or the state of a request whose prefix was found.",
        StatSource("tail_requests"),
    ),
    _metric(
        "stepwell_tail_block_lookups_total",
        "Blocks of windows and states that were asked for: found (hit) or not (miss).",
        StatSource("tail_hits", {"outcome": "hit"}),
        StatSource("tail_misses", {"outcome": "miss"}),
    ),
    _metric(
        "stepwell_missed_blocks_total", "Blocks missed, by why the run ended.", StatSource("misses_*", rest="reason")
    ),
    _metric(
        "stepwell_transfer_bytes_total",
        "Bytes copied up (recall) and down (spill): between the host tier and engines, or between a tier below it "
        "and the host tier.",
        StatSource("recalled_bytes", _HOST | _RECALL),
        StatSource("spilled_bytes", _HOST | _SPILL),
        _below("recalled_bytes", _RECALL),
        _below("spilled_bytes", _SPILL),
    ),
    _metric(
        "stepwell_transfer_blocks_total",
        "Blocks copied up (recall) and down (spill).",
        StatSource("recalled_blocks", _HOST | _RECALL),
        StatSource("spilled_blocks", _HOST | _SPILL),
        _below("recalled_blocks", _RECALL),
        _below("spilled_blocks", _SPILL),
    ),
    _metric(
        "stepwell_transfer_seconds_total",
        "Time that reads (recall) and writes (spill) of a tier took; those that ran at once are added up.",
        _below("recall_seconds", _RECALL),
        _below("spill_seconds", _SPILL),
    ),
    _metric(
        "stepwell_tier_used_bytes",
        "Bytes of a tier that hold blocks.",
        StatSource("block_bytes", _HOST),
        _below("bytes"),
    ),
    _metric(
        "stepwell_tier_capacity_bytes",
        "Bytes that a tier may take.",
        StatSource("host_bytes", _HOST),
        _below("capacity_bytes"),
    ),
    _metric("stepwell_tier_blocks", "Blocks in a tier.", StatSource("blocks", _HOST), _below("blocks")),
    _metric(
        "stepwell_tier_up",
        "1 if a tier is asked for reads (recall) and writes (spill), 0 if not for now: it hangs or fails.",
        _below("reads_up", _RECALL),
        _below("writes_up", _SPILL),
    ),
    _metric(
        "stepwell_tier_allocated_bytes",
        "Shared memory that the host tier takes now, used or not.",
        StatSource("slab_bytes", _HOST),
    ),
    _metric(
        "stepwell_tier_held_bytes",
        "Bytes of the host tier that cannot be reused now: held for waiting requests, blocks on their way up among "
        "them (pinned), or still mapped by engines that were asked to give them back (kept).",
        StatSource("pinned_bytes", _HOST | {"kind": "pinned"}),
        StatSource("kept_bytes", _HOST | {"kind": "kept"}),
    ),
    _metric(
        "stepwell_quarantined_slots",
        "Slots of the host tier that the processes of a lost engine may still be writing.",
        StatSource("quarantined_slots"),
    ),
    _metric(
        "stepwell_dropped_blocks_total",
        "Blocks that a tier gave up, by why: their room was needed (evicted), they were prefetched in vain "
        "(unused), their slab was given back (retired), or an operator cleared them (cleared).",
        StatSource("dropped_*", _HOST, rest="reason"),
        _below("evicted_blocks", {"reason": "evicted"}),
    ),
    _metric(
        "stepwell_reinserted_blocks_total",
        "Blocks in use that a tier wrote anew when it evicted the segment they were in.",
        _below("reinserted_blocks"),
    ),
    _metric(
        "stepwell_spill_skipped_blocks_total",
        "Blocks that were offered to a tier and not taken.",
        StatSource("spills_refused_*", _HOST, rest="reason"),
        _below("skipped_*", rest="reason"),
    ),
    _metric(
        "stepwell_recall_failed_blocks_total",
        "Blocks that a tier was believed to have and did not bring: misses, never wrong bytes.",
        _below("not_recalled_*", rest="reason"),
    ),
    _metric(
        "stepwell_prefetched_blocks_total",
        "Blocks promoted because a conversation was expected to go on: asked for in time (used), or not (unused).",
        StatSource("prefetches_used", {"outcome": "used"}),
        StatSource("prefetches_unused", {"outcome": "unused"}),
    ),
    _metric(
        "stepwell_unreadable_segments",
        "Segments of a tier that cannot be read: their keys are not in the keyring, or they are damaged or of "
        "another version. They are never deleted unasked.",
        _below("kept_segments"),
    ),
    _metric(
        "stepwell_errors_total",
        "Faults that cost blocks, never requests.",
        StatSource("dropped_failed_check", _HOST | {"kind": "failed_check"}),
        StatSource("troubles", _HOST | {"kind": "memory_refused"}),
        _below("errors_*", rest="kind"),
        _below("reads_stopped", {"kind": "reads_stopped"}),
        _below("writes_stopped", {"kind": "writes_stopped"}),
    ),
    _metric("stepwell_write_queue_bytes", "Bytes that wait to be written to a tier.", _below("write_queue_bytes")),
    _metric(
        "stepwell_device_written_bytes_total",
        "Bytes written to a tier's devices with all overheads: what wears them.",
        _below("device_written_bytes"),
    ),
    _metric(
        "stepwell_canaries_total",
        "Stored blocks that an engine computed once more to compare them: equal within rounding (clean), or not "
        "(mismatch).",
        StatSource("canaries_clean", {"outcome": "clean"}),
        StatSource("canaries_mismatched", {"outcome": "mismatch"}),
    ),
    _metric(
        "stepwell_quarantined_namespaces",
        "Namespaces with blocks of other weights, from which nothing is recalled until they are cleared. Alert "
        "above 0.",
        StatSource("quarantined_namespaces"),
    ),
    _metric(
        "stepwell_paused",
        "1 if recalls or spills were switched off by `stepwell pause`, until `stepwell resume`.",
        StatSource("paused_recalls", {"kind": "recalls"}),
        StatSource("paused_spills", {"kind": "spills"}),
    ),
    _metric(
        "stepwell_recall_decisions_total",
        "Requests for which recall was weighed against computing, by why something was recalled (worth_it, "
        "unknown, always) or nothing (recompute_cheaper).",
        StatSource("decided_*", rest="reason"),
    ),
    _metric(
        "stepwell_recalls_given_up_total",
        "Recalls that ended before all that was wanted had come: the rest was computed sooner (late), or the time "
        "limit was reached (limit), or a window or a state was missing where it ends (no_place).",
        StatSource("gave_up_*", rest="reason"),
    ),
    _metric(
        "stepwell_recall_ttft_seconds_total",
        "Time to first token of weighed requests: what the best choice in hindsight would have taken (best), and "
        "how much longer they took (regret).",
        StatSource("decision_best_seconds", {"kind": "best"}),
        StatSource("decision_regret_seconds", {"kind": "regret"}),
    ),
    _metric(
        "stepwell_recall_patience_regret_seconds_total",
        "Seconds lost by limits of waiting: waits for blocks that did not come in them (waited), and what computing "
        "took longer than waiting on for blocks that came later (gave_up).",
        StatSource("waited_in_vain_seconds", {"kind": "waited"}),
        StatSource("given_up_too_soon_seconds", {"kind": "gave_up"}),
    ),
    _metric(
        "stepwell_engine_reports_total",
        "Events that only engines see and have reported: bypassed requests, late answers, failed loads.",
        StatSource("engine_*", rest="kind"),
    ),
)

SERVED = (
    *METRICS,
    *(
        replace(metric, name=old, help=renamed.deprecated(metric.name))
        for metric in METRICS
        for old, new in renamed.METRICS.items()
        if new == metric.name
    ),
)
"""All metrics with their old names."""


def families(stats: WellStats) -> Iterator[MetricFamily]:
    """All metrics with what `stats` has of them. Figures that the table does not know are left out."""
    for metric in SERVED:
        found = [sample for source in metric.sources for sample in _samples(source, stats)]
        yield MetricFamily(metric.name, metric.kind, metric.help, found)


_NAMED = {
    below: frozenset(source.key for metric in METRICS for source in metric.sources if source.below is below)
    for below in (False, True)
}


def keys_of(source: StatSource, figures: Figures) -> list[str]:
    """The names of those `figures` that this source takes."""
    if not source.key.endswith("*"):
        return [source.key] if source.key in figures else []
    return [key for key in figures if key.startswith(source.key[:-1]) and key not in _NAMED[source.below]]


def _samples(source: StatSource, stats: WellStats) -> Iterator[Sample]:
    if not source.below:
        yield from _of(source, source.labels, stats.well)
        return
    for tier, figures in stats.tiers.items():
        yield from _of(source, {"tier": tier, **source.labels}, figures)


def _of(source: StatSource, labels: Mapping[str, str], figures: Figures) -> Iterator[Sample]:
    keys = keys_of(source, figures)
    if source.key.endswith("*"):
        numbers = {key: value for key in keys if not isinstance(value := figures[key], str)}
        if source.rest:
            for key in list(numbers)[:MAX_LABEL_VALUES]:
                yield Sample({**labels, source.rest: key[len(source.key) - 1 :]}, numbers[key])
        elif numbers:
            yield Sample(labels, sum(numbers.values()))
        return
    for key in keys:
        value = figures[key]
        if isinstance(value, str):
            if source.rest:
                yield Sample({**labels, source.rest: value}, 1)
        else:
            yield Sample(labels, value)
