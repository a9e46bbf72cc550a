"""A pytest fixture: each device that tests of pages run on, in turn. A `conftest.py` imports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


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
