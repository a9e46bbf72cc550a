"""vLLM's entry point: makes the connector known by name, in every process, without importing it."""

from __future__ import annotations

import logging

NAME = "StepwellConnector"


def register() -> None:
    """Idempotent; never raises, since an exception here would only be logged by vLLM and hide the cause."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "stepwell.engines.vllm.connector", NAME)
    except ValueError:
        pass  # registered before: vLLM loads plugins in every process, sometimes twice
    except Exception as error:  # noqa: BLE001 - the boundary to the engine
        logging.getLogger("stepwell").error(
            "what: the vLLM plugin could not be registered  why: %s  fix: check the versions of vLLM and stepwell  "
            "[SW-110]",
            error,
        )
