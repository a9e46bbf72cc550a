"""Slabs that go while a driver has them, and a worker that goes while it has slabs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stepwell.bench.gpu.kv import Kv, Layout, Shape
from stepwell.engines.paged import open_copies
from stepwell.io.memory import Bytes
from stepwell.testing.well import RealWell, eventually

from .engines import PAGE, hashing, prompts, recalled


class Registry:
    """Which slabs are registered with the device of these copies, and how often one was taken back."""

    def __init__(self, prepare: Callable[[Bytes], Callable[[], None]] | None) -> None:
        self._prepare = prepare
        self.held: set[int] = set()
        self.undone = 0

    def __call__(self, memory: Bytes) -> Callable[[], None]:
        address = memory.ctypes.data
        undo = self._prepare(memory) if self._prepare is not None else lambda: None
        assert address not in self.held
        self.held.add(address)

        def taken_back() -> None:
            undo()
            self.held.remove(address)
            self.undone += 1

        return taken_back


def test_a_slab_that_is_retired_is_taken_back_from_the_driver_first(device: str, folder: Path) -> None:
    """Two models share a small arena: what one needs, the other's slabs are retired for."""
    shape = Shape(4, 400, 4, PAGE, 128)
    with RealWell(folder / "home", host="128MiB") as well:
        kvs = [Kv.make(shape, Layout.BLHNC, device) for _ in range(2)]
        copies = [open_copies(kv.caches, shape.pages) for kv in kvs]
        registries = [Registry(one.prepare) for one in copies]
        for one, registry in zip(copies, registries, strict=True):
            one.prepare = registry if device == "cpu" else None  # type: ignore[misc]
        asked = prompts(5, seed=8, least=1200, most=1600)
        with (
            hashing(well.home, device, kv=kvs[0], copies=copies[0], model="a", budget=400) as (first, right),
            hashing(well.home, device, kv=kvs[1], copies=copies[1], model="b", budget=400) as (second, too),
        ):
            for turn in range(3):
                for engine in (first, second):
                    for prompt in asked:
                        engine.serve(prompt[turn:], 2)
                        engine.pool.forget()
            assert right.wrong == too.wrong == 0
