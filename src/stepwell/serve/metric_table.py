"""Which number of the well's `stats` is which metric: one table, read by the endpoint, by the docs and by their test.

Conventions are Prometheus's: base units, `_total` on counters, no colons. Labels are few and hold words from lists of
ours, never tenants, models or prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stepwell.serve.exposition import Family, Kind, Sample

LABELS = frozenset({"tier", "op", "outcome", "reason", "kind", "source", "engine"})
"""All labels that may be used, but for `version` of the metric whose purpose that is."""

MOST_REST = 64
"""Samples that one prefix may become: some names come from engines."""

Values = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a metric's samples come from: the stat `key`; if that ends in `*`, all that begin so and that no source
    names in full. Then `rest` is the label that holds what is left of the name, or "" for one sample of their sum. Of a
    stat that is text, `rest` is the label that holds the text, and the sample is 1."""

    key: str
    labels: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    sources: tuple[Source, ...]

    @property
    def labels(self) -> list[str]:
        found = {name for source in self.sources for name in (*source.labels, source.rest) if name}
        return sorted(found)


_HOST, _DISK = {"tier": "host"}, {"tier": "disk"}
_RECALL, _SPILL = {"op": "recall"}, {"op": "spill"}

METRICS = (
    Metric(
        "stepwell_build_info",
        "gauge",
        "Always 1; the version of the well that answered.",
        (Source("well", rest="version"),),
    ),
    Metric("stepwell_uptime_seconds", "gauge", "Time since the well started.", (Source("uptime_s"),)),
    Metric("stepwell_sessions", "gauge", "Engines that are connected.", (Source("sessions"),)),
    Metric(
        "stepwell_session_ends_total", "counter", "Engines that have left or were lost.", (Source("sessions_ended"),)
    ),
    Metric("stepwell_requests_total", "counter", "Requests whose prefix was looked up.", (Source("requests"),)),
    Metric(
        "stepwell_block_lookups_total",
        "counter",
        "Blocks of looked-up prefixes: offered to the engine, or beyond where the run ended.",
        (Source("hits", {"outcome": "hit"}), Source("misses_*", {"outcome": "miss"})),
    ),
    Metric(
        "stepwell_misses_total", "counter", "Blocks missed, by why the run ended.", (Source("misses_*", rest="reason"),)
    ),
    Metric(
        "stepwell_transfer_bytes_total",
        "counter",
        "Bytes copied up (recall) and down (spill): host from and to engines, disk from and to the host tier.",
        (
            Source("recalled_bytes", _HOST | _RECALL),
            Source("spilled_bytes", _HOST | _SPILL),
            Source("disk_recalled_bytes", _DISK | _RECALL),
            Source("disk_spilled_bytes", _DISK | _SPILL),
        ),
    ),
    Metric(
        "stepwell_transfer_blocks_total",
        "counter",
        "Blocks copied up (recall) and down (spill).",
        (
            Source("recalled_blocks", _HOST | _RECALL),
            Source("spilled_blocks", _HOST | _SPILL),
            Source("disk_recalled_blocks", _DISK | _RECALL),
            Source("disk_spilled_blocks", _DISK | _SPILL),
        ),
    ),
    Metric(
        "stepwell_transfer_seconds_total",
        "counter",
        "Time that reads (recall) and writes (spill) of a tier took, added up over all that ran at once.",
        (Source("disk_recall_seconds", _DISK | _RECALL), Source("disk_spill_seconds", _DISK | _SPILL)),
    ),
    Metric(
        "stepwell_tier_used_bytes",
        "gauge",
        "Bytes of a tier that hold blocks.",
        (Source("block_bytes", _HOST), Source("disk_bytes", _DISK)),
    ),
    Metric(
        "stepwell_tier_capacity_bytes",
        "gauge",
        "Bytes that a tier may take.",
        (Source("host_bytes", _HOST), Source("disk_capacity_bytes", _DISK)),
    ),
    Metric(
        "stepwell_tier_blocks", "gauge", "Blocks in a tier.", (Source("blocks", _HOST), Source("disk_blocks", _DISK))
    ),
    Metric(
        "stepwell_tier_up",
        "gauge",
        "1 if a tier is asked for reads (recall) and writes (spill), 0 if not for now: it hangs or fails.",
        (Source("disk_reads_up", _DISK | _RECALL), Source("disk_writes_up", _DISK | _SPILL)),
    ),
    Metric("stepwell_slab_bytes", "gauge", "Shared memory that slabs take.", (Source("slab_bytes"),)),
    Metric(
        "stepwell_held_bytes",
        "gauge",
        "Bytes of the host tier held for waiting requests, those on their way up from disk among them (pinned), and by "
        "engines that have not unmapped yet what was taken from them (kept).",
        (Source("pinned_bytes", {"kind": "pinned"}), Source("kept_bytes", {"kind": "kept"})),
    ),
    Metric(
        "stepwell_quarantined_slots",
        "gauge",
        "Slots that a lost engine's processes may still be writing.",
        (Source("quarantined_slots"),),
    ),
    Metric(
        "stepwell_evictions_total",
        "counter",
        "Blocks that a tier let go.",
        (Source("dropped_*", _HOST, "reason"), Source("disk_evicted_blocks", _DISK | {"reason": "evicted"})),
    ),
    Metric(
        "stepwell_reinserted_blocks_total",
        "counter",
        "Blocks that were in use and were written anew when their segment was evicted.",
        (Source("disk_reinserted_blocks", _DISK),),
    ),
    Metric(
        "stepwell_spills_skipped_total",
        "counter",
        "Blocks that were offered to a tier and not taken.",
        (Source("spills_refused_*", _HOST, "reason"), Source("disk_skipped_*", _DISK, "reason")),
    ),
    Metric(
        "stepwell_recalls_failed_total",
        "counter",
        "Blocks that a tier was believed to have and did not bring: misses, never wrong bytes.",
        (Source("disk_not_recalled_*", _DISK, "reason"),),
    ),
    Metric(
        "stepwell_prefetched_blocks_total",
        "counter",
        "Blocks brought up because a conversation was expected to go on: asked for in time (used), or not (unused).",
        (Source("prefetches_used", {"outcome": "used"}), Source("prefetches_unused", {"outcome": "unused"})),
    ),
    Metric(
        "stepwell_unreadable_segments",
        "gauge",
        "Segments on disk whose keys are not in the keyring, of another version or damaged: never deleted unasked.",
        (Source("disk_kept_segments", _DISK),),
    ),
    Metric(
        "stepwell_errors_total",
        "counter",
        "Faults that cost blocks, never requests.",
        (
            Source("dropped_failed_check", _HOST | {"kind": "failed_check"}),
            Source("troubles", _HOST | {"kind": "memory_refused"}),
            Source("disk_errors_*", _DISK, "kind"),
            Source("disk_reads_stopped", _DISK | {"kind": "reads_stopped"}),
            Source("disk_writes_stopped", _DISK | {"kind": "writes_stopped"}),
        ),
    ),
    Metric(
        "stepwell_write_queue_bytes",
        "gauge",
        "Bytes that wait to be written.",
        (Source("disk_write_queue_bytes", _DISK),),
    ),
    Metric(
        "stepwell_device_writes_bytes_total",
        "counter",
        "Bytes written to the device, all overheads included: what wears it.",
        (Source("disk_device_written_bytes", _DISK),),
    ),
    Metric(
        "stepwell_canaries_total",
        "counter",
        "Stored blocks that an engine computed once more: as they are (clean), or not (mismatch).",
        (Source("canaries_clean", {"outcome": "clean"}), Source("canaries_mismatched", {"outcome": "mismatch"})),
    ),
    Metric(
        "stepwell_quarantined_namespaces",
        "gauge",
        "Namespaces with blocks of other weights: nothing of them is recalled until they are cleared. Alarm above 0.",
        (Source("quarantined_namespaces"),),
    ),
    Metric(
        "stepwell_paused",
        "gauge",
        "1 if recalls or spills were switched off by `stepwell pause`, until `stepwell resume`.",
        (Source("paused_recalls", {"kind": "recalls"}), Source("paused_spills", {"kind": "spills"})),
    ),
    Metric(
        "stepwell_decisions_total",
        "counter",
        "Runs that were weighed, by why they were recalled (worth_it, unknown, always) or not (recompute_cheaper).",
        (Source("decided_*", rest="reason"),),
    ),
    Metric(
        "stepwell_recalls_given_up_total",
        "counter",
        "Recalls that ended before all that was wanted had come: late, or at their limit.",
        (Source("gave_up_*", rest="reason"),),
    ),
    Metric(
        "stepwell_decision_seconds_total",
        "counter",
        "Time to first token with the best choice in hindsight (best), and how much longer it took (regret).",
        (Source("decision_best_seconds", {"kind": "best"}), Source("decision_regret_seconds", {"kind": "regret"})),
    ),
    Metric(
        "stepwell_engine_reports_total",
        "counter",
        "What only engines see and have reported: bypassed requests, late answers, failed loads.",
        (Source("engine_*", rest="kind"),),
    ),
)

NOT_METRICS = frozenset(
    {
        "connections",  # this scrape's own among them
        "connections_refused",  # the log says why
        "disk_foreign_files",  # what `stepwell fsck` lists
        "disk_index_bytes",  # follows from disk_blocks
        "disk_prefetched_blocks",  # prefetched_blocks_total says it as soon as it is known whether they were of use
        "disk_recovered_blocks",  # once, at the start: the log says it
        "disk_recovery_seconds",
        "disk_segments",  # disk_bytes says it in bytes
        "disk_staging_blocks",  # comes and goes within a request's wait
        "filling",  # comes and goes within a step
        "free_slots",
        "hits_staged",  # disk's transfer_blocks say it
        "leased_blocks",  # comes and goes within a step
        "messages_refused",  # the log says why
        "paused",  # a sentence; paused_recalls and paused_spills say it in numbers
        "pid",
        "quarantined_sessions",  # quarantined_slots says what they cost
        "sessions_opened",
        "slabs",
        "slabs_made",
        "slabs_retired",
        "trouble",  # a sentence; `troubles` counts
    }
)
"""Stats that people see in `stepwell stats` and that are no metric."""

_NAMED = frozenset(source.key for metric in METRICS for source in metric.sources)


def families(values: Values) -> Iterator[Family]:
    """All metrics with what `values` has of them. Stats that the table does not know are left out."""
    for metric in METRICS:
        samples = [sample for source in metric.sources for sample in _samples(source, values)]
        yield Family(metric.name, metric.kind, metric.help, samples)


def stats_of(source: Source, values: Values) -> list[str]:
    """The stats of `values` that this source takes."""
    if not source.key.endswith("*"):
        return [source.key] if source.key in values else []
    prefix = source.key[:-1]
    return [key for key in values if key.startswith(prefix) and key not in _NAMED]


def _samples(source: Source, values: Values) -> Iterator[Sample]:
    keys = stats_of(source, values)
    if source.key.endswith("*"):
        numbers = {key: value for key in keys if not isinstance(value := values[key], str)}
        if source.rest:
            for key in list(numbers)[:MOST_REST]:
                yield Sample({**source.labels, source.rest: key[len(source.key) - 1 :]}, numbers[key])
        elif numbers:
            yield Sample(source.labels, sum(numbers.values()))
        return
    for key in keys:
        value = values[key]
        if isinstance(value, str):
            if source.rest:
                yield Sample({**source.labels, source.rest: value}, 1)
        else:
            yield Sample(source.labels, value)
