"""Blocks a second of one core, as a well's thread: lookups, spills with their recalls, and the same with a disk.

In the process itself first (`core`), where nothing but the state machine is timed, in runs of some lengths; then a real
well over its socket (`pressure`), by the kernel's account of its thread, and how long a lookup takes while that is half
busy. Runs of all lengths take turns.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.bench.halves.core import Core
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats

MIB = 1 << 20
LOOKUPS, SPILLS, WITH_DISK = 300_000, 40_000, 13_000
"""Blocks a second that are asked for."""


@dataclass(frozen=True, slots=True)
class Size:
    """`runs`: lengths in blocks. `blocks`: of one sample of the host tier; `stored`: of one with a disk."""

    runs: tuple[int, ...] = (16, 64, 1024)
    blocks: int = 16_384
    stored: int = 4_096
    samples: int = 15


FULL, QUICK = Size(), Size((16,), 1024, 1024, 2)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows = _host(size)
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        rows += _disk(size, Path(folder))
    return Result("rates", rows, {"samples": size.samples})


def _host(size: Size) -> list[Row]:
    found: dict[str, list[float]] = {}
    with Core(2 * size.blocks * 4096) as core:
        engine = Engine(core)
        for length in size.runs:
            engine.spill(length, size.blocks // length // len(size.runs))
        for _ in range(size.samples):
            for length in size.runs:
                found.setdefault(f"lookups, runs of {length}", []).append(engine.lookups(length, size.blocks))
    with Core(size.blocks * 4096) as core:
        engine = Engine(core)
        engine.spill(64, size.blocks // 64)
        for _ in range(size.samples):
            for length in size.runs:
                found.setdefault(f"reserve, fill and recall, runs of {length}", []).append(
                    engine.round_trips(length, size.blocks // 4)
                )
    return [_row(what, rates, LOOKUPS if "lookups" in what else SPILLS) for what, rates in found.items()]


def _disk(size: Size, folder: Path) -> list[Row]:
    found: dict[str, list[float]] = {}
    for length in size.runs:
        with Core(size.stored * 4096, folder=folder / str(length)) as core:
            engine = Engine(core)
            engine.spill(length, 4 * size.stored // length)
            found[f"the same with a disk, runs of {length}"] = [
                engine.by_disk(length, size.stored) for _ in range(size.samples)
            ]
    return [_row(what, rates, WITH_DISK) for what, rates in found.items()]


def _row(what: str, rates: list[float], least: int) -> Row:
    estimate = stats.median(rates)
    return Row(
        what,
        "thousand blocks/s",
        estimate.times(1e-3),
        Target(">=", least / 1e3),
        f"{1e6 / estimate.value:.2f} us each",
    )


class Engine:
    """Asks for runs of blocks that it has spilled. Rates are blocks a second of the well's thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._dice = random.Random(1)
        self._number = 0
        self._prompts: dict[int, list[bytes]] = {}
        self.incomplete = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def spill(self, length: int, prompts: int) -> None:
        for _ in range(prompts):
            self._prompts.setdefault(length, []).append(self._spill(length))

    def _spill(self, length: int) -> bytes:
        prompt = os.urandom(32 * length)
        for at in range(0, len(prompt), 32 * 256):
            granted = self._core.reserve(self._next(), prompt[at : at + 32 * 256], prompt[max(0, at - 32) : at])
            self._core.fill([lease for lease in granted.leases if lease])
            self.incomplete += granted.leases.count(0)
        self._core.written()
        return prompt

    def _rate(self, blocks: int, work: Callable[[], None]) -> float:
        return blocks / self._core.spent(work)

    def lookups(self, length: int, blocks: int) -> float:
        prompts = self._prompts[length]

        def work() -> None:
            for _ in range(blocks // length):
                number = self._next()
                self.incomplete += length - self._core.ask(number, self._dice.choice(prompts))
                self._core.release(number)

        return self._rate(blocks // length * length, work)

    def round_trips(self, length: int, blocks: int) -> float:
        """New blocks are reserved and filled, where others have to leave, and recalled."""

        def work() -> None:
            for _ in range(max(1, blocks // length)):
                self._recall(self._spill(length))

        return self._rate(max(1, blocks // length) * length, work)

    def by_disk(self, length: int, blocks: int) -> float:
        """The same, and what is recalled is some earlier prompt that host memory has nothing of."""
        prompts = self._prompts[length]

        def work() -> None:
            for _ in range(blocks // length):
                prompts.append(self._spill(length))
                below = next(prompt for prompt in prompts if not self._core.has(prompt[:32]))
                prompts.remove(below)
                prompts.append(below)
                self._recall(below)

        return self._rate(blocks // length * length, work)

    def _recall(self, prompt: bytes) -> None:
        number = self._next()
        found = self._core.ask(number, prompt)
        self.incomplete += len(prompt) // 32 - found
        self._core.recall(number, found)
