"""Counters of stepwell in the engine's own /metrics, and the tally that the scheduler half keeps for them.

A count's key is "family/label": flat, so that it survives whatever way the engine carries it from its own process to
the one that serves /metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepwell import renamed

if TYPE_CHECKING:
    from stepwell.engines.common.plan import StepReport

Counts = dict[str, int | float]


@dataclass(frozen=True, slots=True)
class CounterFamily:
    """A Prometheus counter; its exposed name ends in `_total`. `label` is "" for one without labels of ours; `expected`
    are values of it that are shown from the start, as 0."""

    name: str
    help: str
    label: str = ""
    expected: tuple[str, ...] = ()


FAMILIES: Mapping[str, CounterFamily] = {
    "recalled_tokens": CounterFamily(
        "stepwell_engine_recalled_tokens", "Tokens that arrived in requests' pages.", "tier", ("host",)
    ),
    "recalls": CounterFamily("stepwell_engine_recalls", "Recalls that brought tokens into a request."),
    "recall_seconds": CounterFamily(
        "stepwell_engine_recall_seconds",
        "Time of these recalls, added up: from the scheduler's first ask until the last rank had its bytes.",
    ),
    "misses": CounterFamily(
        "stepwell_engine_missed_requests",
        "Requests of which the well had less than was asked for, or was not asked, by why.",
        "reason",
    ),
    "transfer_bytes": CounterFamily(
        "stepwell_engine_transfer_bytes",
        "Bytes that workers copied from the host tier (recall) and into it (spill), all ranks together.",
        "op",
        ("recall", "spill"),
    ),
    "canary_tokens": CounterFamily(
        "stepwell_engine_canary_tokens",
        "Tokens that could have been recalled and were computed instead, to be compared with what is stored.",
    ),
    "streams": CounterFamily(
        "stepwell_engine_streamed_recalls",
        "Recalls that were offered to the engine while their blocks were still read, by whether all came (whole) or the"
        " engine computed the rest (short): it goes on to count that as cached.",
        "outcome",
        ("whole", "short"),
    ),
    "errors": CounterFamily(
        "stepwell_engine_errors",
        "What went wrong and cost recalls or spills, never a request: failed loads of each rank, exceptions in hooks of"
        " the scheduler.",
        "kind",
        ("failed_load", "hook"),
    ),
}

SERVED: Mapping[str, CounterFamily] = {
    **FAMILIES,
    **{
        f"old_{key}": replace(family, name=old.removesuffix("_total"), help=renamed.deprecated(new))
        for old, new in renamed.METRICS.items()
        for key, family in FAMILIES.items()
        if new == f"{family.name}_total"
    },
}
"""All families, and under `old_KEY` those that keep the old name of one."""

_COUNTED = {
    "failed_loads": "errors/failed_load",
    "hook_errors": "errors/hook",
    "canary_tokens": "canary_tokens/",
    "whole_streams": "streams/whole",
    "short_streams": "streams/short",
}


class Tally:
    """Counts since they were last taken. Used by the scheduler's thread alone. `told` is called with each answer's
    reason."""

    def __init__(self, told: Callable[[str], None] = lambda reason: None) -> None:
        self._told = told
        self._counts: Counts = {}

    def _add(self, key: str, n: int | float) -> None:
        self._counts[key] = self._counts.get(key, 0) + n

    def counted(self, name: str, n: int) -> None:
        """Adds what the halves count for the well, under the name that it has there."""
        kind, _, reason = name.partition("_")
        if kind in ("missed", "bypassed"):
            self._add(f"misses/{reason}", n)
        elif name in _COUNTED:
            self._add(_COUNTED[name], n)

    def answered(self, reason: str) -> None:
        """Adds a request that goes on with what the well has of it; `reason` says why the well has no more."""
        self._told(reason)
        if reason != "end":
            self._add(f"misses/{reason}", 1)

    def recalled(self, tiers: Mapping[str, int], seconds: float) -> None:
        """Adds a recall that has brought these tokens, by tier."""
        if not any(tiers.values()):
            return
        for tier, tokens in tiers.items():
            self._add(f"recalled_tokens/{tier}", tokens)
        self._add("recalls/", 1)
        self._add("recall_seconds/", seconds)

    def copied(self, report: StepReport) -> None:
        """Adds the bytes that workers copied in a step."""
        if report.recalled_bytes:
            self._add("transfer_bytes/recall", report.recalled_bytes)
        if report.spilled_bytes:
            self._add("transfer_bytes/spill", report.spilled_bytes)

    def take(self) -> Counts | None:
        """Counts since the last call; None if there are none."""
        if not self._counts:
            return None
        counts, self._counts = self._counts, {}
        return counts
