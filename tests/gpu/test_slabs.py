"""Slabs that go while a driver has them, and a worker that goes while it has slabs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.bench.gpu.engine.kv import Kv, Layout, Shape
from lab.rig.well import RealWell, eventually
from stepwell.engines.paged import open_copies
from stepwell.engines.paged.base import Copies
from stepwell.io.memory import Bytes

from .engines import PAGE, hashing, prompts, recalled, served_by_recall, whole_blocks

VICTIM = Path(__file__).with_name("victim.py")


class Watched:
    """Copies, and which slabs are registered with their device now; `undone`: how often one was taken back."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.held: set[int] = set()
        self.undone = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def prepare(self, memory: Bytes) -> Callable[[], None]:
        address = memory.ctypes.data
        undo = self._copies.prepare(memory) if self._copies.prepare is not None else lambda: None
        assert address not in self.held
        self.held.add(address)

        def taken_back() -> None:
            assert memory.ctypes.data == address, "it is mapped still"
            undo()
            self.held.remove(address)
            self.undone += 1

        return taken_back


def test_a_slab_that_is_retired_is_taken_back_from_the_driver_before_it_is_unmapped(device: str, folder: Path) -> None:
    """Two models share a small arena: for what one needs, the other's slabs are retired, while it goes on."""
    shape = Shape(4, 400, 4, PAGE, 128)
    kvs = [Kv.make(shape, Layout.BLHNC, device) for _ in range(2)]
    watched = [Watched(open_copies(kv.caches, shape.pages)) for kv in kvs]
    asked = prompts(4, seed=8, least=900, most=1100)
    with (
        RealWell(folder / "home", host="64MiB") as well,
        hashing(well.home, device, kv=kvs[0], copies=watched[0], model="a", budget=400) as (first, right),
        hashing(well.home, device, kv=kvs[1], copies=watched[1], model="b", budget=400) as (second, too),
    ):
        for turn in range(2):
            for engine in (first, second):
                for prompt in asked:
                    engine.serve(prompt[turn:], 2)
                    engine.pool.forget()
                    engine.serve(prompt[turn:], 2)
                    engine.pool.forget()
        assert right.wrong == too.wrong == 0
        assert all(one.undone for one in watched), "slabs were retired"
        assert all(one.held for one in watched)
    eventually(lambda: not any(one.held for one in watched), "what is over is taken back")


def test_what_a_killed_worker_had_is_freed_and_another_goes_on(device: str, well: RealWell) -> None:
    asked = prompts(4, seed=9)
    command = [sys.executable, str(VICTIM), str(well.home), device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        try:
            assert victim.stdout.readline() == "ready\n"
        finally:
            victim.kill()
    eventually(lambda: not well.held(), "nothing is held for the dead")
    with hashing(well.home, device) as (engine, compute):
        for _ in range(2):
            live = [served_by_recall(engine, prompt, 4) for prompt in asked]
            assert [recalled(one) for one in live] == [whole_blocks(len(prompt)) for prompt in asked]
            engine.pool.forget()
        assert compute.wrong == 0
    eventually(lambda: not well.held(), "nothing is held")
