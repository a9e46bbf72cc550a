"""Plans and reports as vLLM carries them between its processes: pickled, and of classes that it knows."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from stepwell.engines.common.plan import StepPlan, StepReport


@dataclass
class ConnectorPlan(StepPlan, KVConnectorMetadata):
    """A plan that vLLM hands to its workers with the step."""


@dataclass
class ConnectorReport(StepReport, KVConnectorWorkerMetadata):
    """A report that vLLM gathers from its workers, with `aggregate`, and hands to its scheduler."""
