"""vLLM's entry point: makes the connector and the tier known by name, in every process, without importing them."""

from __future__ import annotations

import logging
from collections.abc import Callable

NAME = "StepwellConnector"
TIER, TIER_CLASS = "stepwell", "StepwellTier"


def register() -> None:
    """Idempotent; never raises, since an exception here would only be logged by vLLM and hide the cause."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    _register(KVConnectorFactory.register_connector, NAME, "stepwell.engines.vllm.connector", NAME)
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # a vLLM whose offloading takes no tiers by name
        return
    _register(SecondaryTierFactory.register_tier, TIER, "stepwell.engines.vllm.tier", TIER_CLASS)


def _register(add: Callable[[str, str, str], None], name: str, module: str, kind: str) -> None:
    try:
        add(name, module, kind)
    except ValueError:
        pass  # registered before: vLLM loads plugins in every process, sometimes twice
    except Exception as error:  # noqa: BLE001 - the boundary to the engine
        logging.getLogger("stepwell").error(
            "what: the vLLM plugin could not be registered  why: %s  fix: check the versions of vLLM and stepwell  "
            "[SW-110]",
            error,
        )
