"""Names that were replaced and still work in this version, each with the name that replaces it.

The next version deletes this file, and with it all that imports it.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, str] = {
    "stepwell_sessions": "stepwell_connected_engines",
    "stepwell_session_ends_total": "stepwell_disconnected_engines_total",
    "stepwell_misses_total": "stepwell_missed_blocks_total",
    "stepwell_slab_bytes": "stepwell_tier_allocated_bytes",
    "stepwell_held_bytes": "stepwell_tier_held_bytes",
    "stepwell_evictions_total": "stepwell_dropped_blocks_total",
    "stepwell_spills_skipped_total": "stepwell_spill_skipped_blocks_total",
    "stepwell_recalls_failed_total": "stepwell_recall_failed_blocks_total",
    "stepwell_device_writes_bytes_total": "stepwell_device_written_bytes_total",
    "stepwell_decisions_total": "stepwell_recall_decisions_total",
    "stepwell_decision_seconds_total": "stepwell_recall_ttft_seconds_total",
    "stepwell_engine_misses_total": "stepwell_engine_missed_requests_total",
}
"""Metrics of the well and of the engine: both names are served."""


def deprecated(new: str) -> str:
    """The help text of a metric's old name."""
    return f"Deprecated, gone with the next version: use {new}."


VALUES: Mapping[str, Mapping[str, str]] = {setting: {"default": "auto"} for setting in ("recall", "policy", "decide")}
"""By setting, of a well or of a simulated fleet: values that are read as others."""


def value(setting: str, given: str) -> str:
    """The value that is meant by what was `given` for a setting."""
    return VALUES.get(setting, {}).get(given, given)


def old_value(setting: str, given: str) -> str:
    """The warning for an old value."""
    return f"{setting}: `{given}` is `{value(setting, given)}` now; the old word goes with the next version"


COMMANDS: Mapping[str, tuple[str, ...]] = {
    "clear": ("cache", "clear"),
    "namespaces": ("cache", "namespaces"),
    "fsck": ("cache", "fsck"),
    "bench fidelity": ("fidelity",),
    "bench indexes": ("indexes",),
}
"""First words of a command line, and the words that replace them."""

NO_BENCH = (
    "benchmarks are no command any more: run `python -m lab.bench` in a clone of stepwell; "
    "`bench fidelity` and `bench indexes` are `stepwell fidelity` and `stepwell indexes`"
)
