"""The demo's own well: a home in a fresh folder, so that a user's well is neither seen nor touched.

The connector starts the well; this module names its home, reads its figures and ends it. The only place of the demo
that knows stepwell itself.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.config import Settings
from stepwell.engines.vllm.plugin import NAME
from stepwell.errors import BackendDown, StepwellError
from stepwell.tiers.disk.site import take
from stepwell.units import Amount

MIB = 1 << 20
WRITTEN_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoWell:
    """The demo's well. Its engines give receipts. `host_bytes` bounds the host tier; memory is taken as blocks come.
    `disk_bytes` bounds the disk tier, a folder beside home; 0: none. `settings`: further ones, of the connector or the
    well."""

    home: Path
    host_bytes: int
    disk_bytes: int = 0
    settings: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        return self.home.with_name("disk")

    def connector(self) -> dict[str, Any]:
        """The value of --kv-transfer-config that a user would pass, with this home added."""
        host = f"{-(-self.host_bytes // MIB)}MiB"
        extra: dict[str, str | int] = {"home": str(self.home), "host": host, "receipts": True}
        if self.disk_bytes:
            extra["disk"] = f"{self.disk}:{self.disk_bytes}"
        return {"kv_connector": NAME, "kv_role": "kv_both", "kv_connector_extra_config": {**extra, **self.settings}}

    def check(self) -> None:
        """Raises StepwellError where a well could not have this disk tier."""
        if self.disk_bytes:
            with tempfile.TemporaryDirectory(prefix="check-", dir=self.home.parent) as folder:
                take(Path(folder) / "disk", Amount(size=self.disk_bytes), Settings().disk_reserve).files.close()

    def figure(self, name: str) -> int | None:
        """A figure of `stepwell stats`; None if the well does not say."""
        from stepwell.client import control

        try:
            return int(control.stats(self.home)[name])
        except (StepwellError, KeyError):
            return None

    def wait_until_written(self) -> bool:
        """Waits until everything spilled so far is on disk or was given up. False: not within a minute."""
        deadline = time.monotonic() + WRITTEN_LIMIT_S
        while self.figure("disk_write_queue_bytes") != 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        """Ends the well with SIGKILL, so that nothing more is written. Does nothing if there is no well."""
        from stepwell.client import control

        if pid := control.pid(self.home):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ends the well and gives its memory back. Quiet if there is none; raises BackendDown SW-503 if it stays."""
        from stepwell.client import control

        try:
            control.stop(self.home)
        except BackendDown as error:
            if error.code != "SW-505":
                raise
