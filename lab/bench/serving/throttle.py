"""A well whose disk tier reads no faster than it is told: `python -m lab.bench.serving.throttle HOME HOST DISK SPEED`.

SPEED is a file with bytes a second, looked at at each read; 0 is as fast as it goes. All reads of the tier share them,
one after the other, as on a device or a link; each waits for its turn in the thread that reads. Otherwise the well is
what `stepwell serve` runs. Says "ready" when engines may connect. For benchmarks: no product has such a setting.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from stepwell.config import Settings
from stepwell.config.places import parse_places
from stepwell.io.files import File, Files
from stepwell.io.memory import Bytes
from stepwell.serve import process, storage
from stepwell.tiers.disk.tier import Site
from stepwell.units import parse_amount


class Throttle:
    """Bytes a second that all who `pass_` share. Any thread."""

    def __init__(self, speed: Path) -> None:
        self._speed = speed
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_(self, nbytes: int) -> None:
        speed = float(self._speed.read_text())
        if speed <= 0:
            return
        with self._lock:
            self._free_at = until = max(time.monotonic(), self._free_at) + nbytes / speed
        time.sleep(max(0.0, until - time.monotonic()))


class _SlowFile:
    def __init__(self, file: File, throttle: Throttle) -> None:
        self._file = file
        self._throttle = throttle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, into: Bytes, offset: int) -> int:
        self._throttle.pass_(len(into))
        return self._file.read(into, offset)


class SlowFiles:
    """Files as they are, but for the time that reading them takes."""

    def __init__(self, files: Files, throttle: Throttle) -> None:
        self._files = files
        self._throttle = throttle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, name: str) -> File:
        return cast(File, _SlowFile(self._files.open(name), self._throttle))

    def create(self, name: str, nbytes: int) -> File:
        return cast(File, _SlowFile(self._files.create(name, nbytes), self._throttle))


def main() -> None:
    home, host, disk, speed = sys.argv[1:5]
    throttle = Throttle(Path(speed))

    def slow_sites(settings: Settings) -> Sequence[Site]:
        return [
            Site(cast(Files, SlowFiles(site.files, throttle)), site.limit, site.reserve, site.segment)
            for site in storage.take_sites(settings)
        ]

    vars(process)["take_sites"] = slow_sites
    settings = Settings(host=parse_amount(host), disk=parse_places(disk))
    process.run(Path(home), settings, ready=lambda at: print("ready", flush=True))


if __name__ == "__main__":
    main()
