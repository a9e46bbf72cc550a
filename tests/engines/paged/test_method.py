"""Copy engine or kernel: what brings back every byte, and of that what is faster."""

from __future__ import annotations

from subprocess import CalledProcessError
from typing import Any

import pytest

pytest.importorskip("torch", reason="pages are torch's tensors")

import torch

from lab.rig.late_device import LateDevice
from stepwell.engines.paged.gpu import method as method_module
from stepwell.engines.paged.gpu.device import CopyMethod, Direction
from stepwell.engines.paged.gpu.method import faster, measure
from stepwell.engines.paged.pool import Pool, pool_of
from stepwell.errors import Unsupported

ENGINES = dict.fromkeys(Direction, CopyMethod.ENGINE)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_module, "SAMPLE_BYTES", 1 << 10)


def tensors(size: int = 64) -> dict[str, torch.Tensor]:
    return {str(n): torch.randint(0, 256, (20, size), dtype=torch.uint8) for n in range(2)}


class Fast(LateDevice):
    """Its kernel takes half of the copy engine's time. `spoils`: which copies lose a byte."""

    def __init__(self, spoils: set[tuple[Direction, CopyMethod]] | None = None) -> None:
        super().__init__(1)
        self._spoils = spoils or set()
        self._way = CopyMethod.ENGINE

    def enqueue(self, direction: Direction, way: CopyMethod, where: Any, pool: Pool, after: Any) -> Any:
        self._way = way
        began, ended = super().enqueue(direction, way, where, pool, after)
        if (direction, way) in self._spoils and direction is Direction.OUT:
            ended.wait()
            memory = next(m for at, m in self._reachable.items() if at == int(where.host[0]))
            memory[5] ^= 1
        return began, ended

    def seconds(self, began: Any, ended: Any) -> float:
        return 0.5 if self._way is CopyMethod.KERNEL else 1.0


def test_the_kernel_must_be_clearly_faster() -> None:
    assert faster(lambda way: 1.0 if way is CopyMethod.ENGINE else 0.5) is CopyMethod.KERNEL
    assert faster(lambda way: 1.0 if way is CopyMethod.ENGINE else 0.9) is CopyMethod.ENGINE


def test_one_slow_first_time_decides_nothing() -> None:
    """It is compiled then."""
    times = iter([60.0] + [0.5] * 10)
    assert faster(lambda way: 1.0 if way is CopyMethod.ENGINE else next(times)) is CopyMethod.KERNEL


def test_pages_keep_their_content() -> None:
    caches = tensors()
    before = {name: tensor.clone() for name, tensor in caches.items()}
    device = Fast()
    assert measure(pool_of(caches, 20), device) == dict.fromkeys(Direction, CopyMethod.KERNEL)
    assert device.copied_bytes >= 4 * 1 << 10
    assert all(torch.equal(caches[name], before[name]) for name in caches)


def test_pages_of_odd_sizes_are_the_copy_engines() -> None:
    assert measure(pool_of(tensors(63), 20), Fast()) == ENGINES


def test_where_a_kernel_does_not_find_registered_memory_it_is_not_used() -> None:
    device = Fast()
    device.kernel_reaches = False
    assert measure(pool_of(tensors(), 20), device) == ENGINES


def test_a_kernel_that_loses_a_byte_is_not_used() -> None:
    assert measure(pool_of(tensors(), 20), Fast({(Direction.OUT, CopyMethod.KERNEL)})) == ENGINES


@pytest.mark.parametrize(
    "error", [RuntimeError("no such kernel"), ImportError("no Triton"), CalledProcessError(1, "cc")], ids=str
)
def test_a_kernel_that_fails_is_not_used(error: Exception) -> None:
    class Without(Fast):
        def enqueue(self, direction: Direction, way: CopyMethod, *others: Any) -> Any:
            if way is CopyMethod.KERNEL:
                raise error
            return super().enqueue(direction, way, *others)

    assert measure(pool_of(tensors(), 20), Without()) == ENGINES


def test_a_gpu_that_loses_a_byte_is_refused_and_pages_keep_their_content() -> None:
    caches = tensors()
    with pytest.raises(Unsupported, match="are not the same") as refused:
        measure(pool_of(caches, 20), Fast({(Direction.OUT, CopyMethod.ENGINE)}))
    assert refused.value.code == "SW-714"
    device = LateDevice(1)
    device.broken = True
    with pytest.raises(RuntimeError, match="on purpose"):
        measure(pool_of(caches, 20), device)
