"""Copy engine or kernel: by measuring, and the copy engine where the kernel cannot be had or is not clearly faster."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="pages are torch's tensors")

import torch

from stepwell.engines.paged import way as way_module
from stepwell.engines.paged.device import Direction, Way
from stepwell.engines.paged.pool import pool_of
from stepwell.engines.paged.way import faster, measure
from stepwell.testing.late_device import LateDevice


def test_the_kernel_must_be_clearly_faster() -> None:
    assert faster(lambda way: 1.0 if way is Way.ENGINE else 0.5) is Way.KERNEL
    assert faster(lambda way: 1.0 if way is Way.ENGINE else 0.9) is Way.ENGINE


def test_one_slow_first_time_decides_nothing() -> None:
    """It is compiled then."""
    times = iter([60.0] + [0.5] * 10)
    assert faster(lambda way: 1.0 if way is Way.ENGINE else next(times)) is Way.KERNEL


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), ImportError("no Triton")])
def test_a_kernel_that_fails_is_not_used(error: Exception) -> None:
    def seconds(way: Way) -> float:
        if way is Way.KERNEL:
            raise error
        return 1.0

    assert faster(seconds) is Way.ENGINE


def test_a_device_that_fails_is_told() -> None:
    def seconds(way: Way) -> float:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        faster(seconds)


def test_pages_keep_their_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_module, "SAMPLE_BYTES", 1 << 10)
    tensors = {str(n): torch.randint(0, 256, (20, 64), dtype=torch.uint8) for n in range(2)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    device = LateDevice(1)
    ways = measure(pool_of(tensors, 20), device)
    assert set(ways) == set(Direction) and device.copied_bytes >= 4 * 1 << 10
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_pages_of_odd_sizes_are_the_copy_engines() -> None:
    device = LateDevice(1)
    ways = measure(pool_of({"a": torch.zeros(20, 63, dtype=torch.uint8)}, 20), device)
    assert ways == dict.fromkeys(Direction, Way.ENGINE) and device.copied_bytes == 0
