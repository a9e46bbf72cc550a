"""The devices, and wells and memory for tests on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.bench.gpu.lane import Slab
from lab.rig.well import RealWell, apart
from stepwell.engines.paged.base import Copies


@pytest.fixture(params=["cpu", "cuda"])
def device(request: Any) -> Iterator[str]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here that torch can use: unverified on GPU")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny shapes: more of them would only wait for each other
    yield request.param
    torch.set_num_threads(threads)
    if request.param == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


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
