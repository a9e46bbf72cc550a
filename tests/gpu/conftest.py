"""The devices, and wells and memory for tests on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.bench.gpu.lane import Slab
from lab.rig.suite.devices import device as device
from lab.rig.well import RealWell, apart
from stepwell.engines.paged.base import Copies


@pytest.fixture
def folder() -> Iterator[Path]:
    """For wells, and apart from all others."""
    with apart() as found:
        yield found


@pytest.fixture
def well(folder: Path) -> Iterator[RealWell]:
    with RealWell(folder / "home", host="64MiB") as found:
        yield found


@contextmanager
def registered(copies: Copies, nbytes: int) -> Iterator[Slab]:
    """Shared memory as a worker has it."""
    slab = Slab(nbytes)
    slab.register(copies)
    try:
        yield slab
    finally:
        slab.close()
