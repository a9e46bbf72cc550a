"""The demo's own well: a home in a fresh folder, so that a user's well is neither seen nor touched.

The connector starts the well; this module names its home, reads its figures and ends it. The only place of the demo
that knows stepwell itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.engines.vllm.plugin import NAME
from stepwell.errors import BackendDown, StepwellError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoWell:
    """`host_bytes` bounds the host tier; memory is taken as blocks come."""

    home: Path
    host_bytes: int

    def connector(self) -> dict[str, Any]:
        """What a user would pass as --kv-transfer-config, plus this home."""
        return {
            "kv_connector": NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"home": str(self.home), "host": f"{-(-self.host_bytes // MIB)}MiB"},
        }

    def used_bytes(self) -> int | None:
        """Bytes of blocks in the host tier now; None if the well does not say."""
        from stepwell.client import control

        try:
            return int(control.stats(self.home)["block_bytes"])
        except StepwellError:
            return None

    def stop(self) -> None:
        """Ends the well and gives its memory back. Quiet if there is none; raises BackendDown SW-503 if it stays."""
        from stepwell.client import control

        try:
            control.stop(self.home)
        except BackendDown as error:
            if error.code != "SW-505":
                raise
