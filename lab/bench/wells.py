"""Wells of the benchmarks' own: a real well process in a fresh home, gone at the end with all that it held."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepwell.client import control
from stepwell.client.start import find_or_start
from stepwell.errors import BackendDown

MIB = 1 << 20
PATIENCE_S = 60.0
_LINGER = {"linger": "1h", "linger_empty": "1h"}  # loading an engine's libraries can take minutes; it is stopped anyway


@contextmanager
def well(host_bytes: int, **wishes: str) -> Iterator[Path]:
    """The home of a running well with an arena of `host_bytes`, and further settings. Raises what keeps it from
    starting."""
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        home = Path(folder) / "home"
        find_or_start(home, {"host": f"{-(-host_bytes // MIB)}MiB", **_LINGER, **wishes})
        try:
            yield home
        finally:
            stop(home)


def stop(home: Path) -> None:
    """Quiet if none runs."""
    try:
        control.stop(home)
    except BackendDown as error:
        if error.code != "SW-505":
            raise


def process(home: Path) -> int:
    """The well's process."""
    return int(control.stats(home, seconds=10)["pid"])
