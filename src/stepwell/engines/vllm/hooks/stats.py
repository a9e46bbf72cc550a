"""Our counts on their way through vLLM to its log line and its /metrics.

    Tally -- take --> EngineStats -- msgpack of `data` --> build -- aggregate, reduce --> log line
                                                                `-- PromMetrics.observe --> /metrics

All of it runs where an exception would end the engine or its server, so that nothing here raises: what cannot be
counted is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from stepwell.engines.common.counts import SERVED
from stepwell.log import RateLimited

log = logging.getLogger("stepwell")
_limited = RateLimited(log)

MAX_VALUES = 32
"""Values of one label that are told apart; the rest are "other"."""


@dataclass
class EngineStats(KVConnectorStats):
    """Counts of an interval, by key."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> EngineStats:
        return EngineStats(_sum(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Sums over labels, by names in words, for the engine's log line."""
        sums: dict[str, int | float] = {}
        for key, n in self.data.items():
            family, _, value = key.partition("/")
            name = f"{value} MB" if family == "transfer_bytes" else family.replace("_", " ")
            sums[name] = sums.get(name, 0) + (n / 1e6 if family == "transfer_bytes" else n)
        return {name: round(n, 3) for name, n in sums.items()}

    def is_empty(self) -> bool:
        return not self.data


def build(data: Mapping[str, Any] | None) -> EngineStats:
    """Stats from `data`, the form in which they travel. Values that are no counts are left out."""
    return EngineStats(_sum({}, data or {}))


def _sum(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    total = dict(a)
    for key, n in b.items():
        if isinstance(key, str) and isinstance(n, int | float):
            total[key] = total.get(key, 0) + n
    return total


class PromMetrics(KVConnectorPromMetrics):
    """Our counters in the registry that the engine's server exposes, with the engine's own labels first."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        self._counters = {
            key: self._counter_cls(
                name=family.name,
                documentation=family.help,
                labelnames=[*labelnames, family.label] if family.label else labelnames,
            )
            for key, family in SERVED.items()
        }
        self._children: dict[tuple[int, str, str], Any] = {}
        for engine in per_engine_labelvalues:
            for key, family in SERVED.items():
                for value in family.expected if family.label else ("",):
                    self._child(engine, key, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for key, n in transfer_stats_data.items():
                family, _, value = key.partition("/")
                for served in (family, f"old_{family}"):
                    if served in SERVED:
                        self._child(engine_idx, served, value).inc(n)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine's server: it would end with us
            _limited.log(logging.WARNING, "observe", "stepwell: not counted in /metrics: %r", error)

    def _child(self, engine: int, key: str, value: str) -> Any:
        child = self._children.get((engine, key, value))
        if child is None:
            if sum(1 for e, k, _ in self._children if (e, k) == (engine, key)) >= MAX_VALUES:
                value = "other"
            labels = [*self.per_engine_labelvalues[engine], *([value] if SERVED[key].label else [])]
            child = self._counters[key].labels(*labels)
            self._children[engine, key, value] = child
        return child


def prom_metrics(*args: Any, **kwargs: Any) -> PromMetrics | None:
    """The metrics, with the arguments of vLLM's `build_prom_metrics`; None, and one line, where they cannot be."""
    try:
        return PromMetrics(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the boundary to the engine's server, which must start
        log.warning("stepwell: the engine's /metrics goes without our counters: %r", error)
        return None


def _unregister() -> None:
    """Removes counters of an engine that this process had before: vLLM removes only its own, and a name can be taken
    once."""
    ours = {family.name for family in SERVED.values()}
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, Counter) and collector._name in ours:
            REGISTRY.unregister(collector)
