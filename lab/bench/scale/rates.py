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

import msgspec

from lab.bench import wells
from lab.bench.halves.blockcost import HOST, pressed
from lab.bench.halves.pressure import Job
from lab.bench.report import Result, Row, Target
from lab.bench.scale.core import Core
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate

LOOKUPS, SPILLS, WITH_DISK = 300_000, 40_000, 13_000
"""Blocks a second that are asked for."""

ENGINES = 16
"""Those that ask together at shares of the speed at which one is answered that asks again at once."""

SHARES, CURVE = (0.5, 2.0), (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0)
"""Shares of that speed; and those of the run of CURVE_RUN blocks, which is the load curve."""

CURVE_RUN = 64


@dataclass(frozen=True, slots=True)
class Size:
    """`runs`: lengths in blocks. `blocks`: of one sample of the host tier; `stored`: of one with a disk. `window_s`: of
    a sample over a socket."""

    runs: tuple[int, ...] = (16, 64, 1024)
    blocks: int = 16_384
    stored: int = 4_096
    samples: int = 15
    window_s: float = 0.3


FULL, QUICK = Size(), Size((16,), 1024, 1024, 2, 0.1)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    counts = {"samples": size.samples, "operations": 0, "incomplete": 0}
    rows = _host(size, counts)
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        rows += _disk(size, Path(folder), counts)
    with wells.well(HOST) as home:
        for operation, least in (("lookup", LOOKUPS), ("recall", None)):
            for length in size.runs:
                rows += _served(home, operation, length, least, size, counts)
    return Result("rates", rows, counts)


def _served(
    home: Path, operation: str, length: int, least: int | None, size: Size, counts: dict[str, int]
) -> list[Row]:
    """Of a well over its socket, in a closed loop; and of lookups how long they take at shares of that load."""
    job = Job(str(home), operation, length, windows=size.samples + 1, window_s=size.window_s)
    windows = pressed([job], counts)
    speed = stats.ratio_of_paired_means([(window.blocks, window.loop_s) for window in windows])
    rows = [_row(f"{operation} over a socket, runs of {length}", speed, least)]
    if operation == "lookup":
        shares = CURVE if length == CURVE_RUN else SHARES
        rows += [_loaded(job, share, share * speed.value) for share in shares]
    return rows


def _host(size: Size, counts: dict[str, int]) -> list[Row]:
    found: dict[str, list[float]] = {}
    with Core(2 * size.blocks * 4096) as core:
        engine = Engine(core, counts)
        for length in size.runs:
            engine.spill(length, size.blocks // length // len(size.runs))
        for _ in range(size.samples):
            for length in size.runs:
                found.setdefault(f"lookups, runs of {length}", []).append(engine.lookups(length, size.blocks))
    with Core(size.blocks * 4096) as core:
        engine = Engine(core, counts)
        engine.spill(64, size.blocks // 64)
        for _ in range(size.samples):
            for length in size.runs:
                found.setdefault(f"reserve, fill and recall, runs of {length}", []).append(
                    engine.round_trips(length, size.blocks // 4)
                )
    return [_row(what, stats.median(rates), LOOKUPS if "lookups" in what else SPILLS) for what, rates in found.items()]


def _disk(size: Size, folder: Path, counts: dict[str, int]) -> list[Row]:
    found: dict[str, list[float]] = {}
    for length in size.runs:
        with Core(size.stored * 4096, folder=folder / str(length)) as core:
            engine = Engine(core, counts)
            engine.spill(length, 4 * size.stored // length)
            found[f"the same with a disk, runs of {length}"] = [
                engine.by_disk(length, size.stored) for _ in range(size.samples)
            ]
    return [_row(what, stats.median(rates), WITH_DISK) for what, rates in found.items()]


def _loaded(job: Job, share: float, speed: float) -> Row:
    """How long lookups take that come at this speed, as far as the engines can ask so fast, and what they find with an
    engine's patience."""
    job = msgspec.structs.replace(job, operation="hurried", engines=ENGINES, rate=speed / job.blocks / ENGINES)
    windows = pressed([job], {"operations": 0, "incomplete": 0})  # what is not found in time is in the row
    seconds, asked = sum(window.seconds for window in windows), sum(window.operations for window in windows)
    found = sum(window.blocks for window in windows)
    more = {
        "asked": round(asked * job.blocks / seconds / 1e3, 1),
        "answered": round(found / seconds / 1e3, 1),
        "busy": round(sum(window.loop_s for window in windows) / seconds, 3),
        "median_ms": round(stats.median([window.took_s * 1e3 for window in windows]).value, 3),
    }
    beside = (
        f"median {more['median_ms']:.2f} ms; {more['asked']:.0f} thousand blocks/s were asked for,"
        f" {found / max(1, asked * job.blocks):.1%} found; the well's thread is busy {more['busy']:.0%} of the time"
    )
    slowest = stats.median([window.slowest_s * 1e3 for window in windows])
    return Row(f"  asked for {share:g} of that: one in a hundred takes", "ms", slowest, None, beside, more)


def _row(what: str, speed: Estimate, least: int | None) -> Row:
    target = Target(">=", least / 1e3) if least is not None else None
    return Row(what, "thousand blocks/s", speed.times(1e-3), target, f"{1e6 / speed.value:.2f} us each")


class Engine:
    """Asks for runs of blocks that it has spilled. Rates are blocks a second of the well's thread. Blocks that were not
    taken or not found are counted as `incomplete`."""

    def __init__(self, core: Core, counts: dict[str, int]) -> None:
        self._core = core
        self._counts = counts
        self._dice = random.Random(1)
        self._number = 0
        self._prompts: dict[int, list[bytes]] = {}

    def _next(self) -> int:
        self._counts["operations"] += 1
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
            self._counts["incomplete"] += granted.leases.count(0)
        self._core.written()
        return prompt

    def _rate(self, blocks: int, work: Callable[[], None]) -> float:
        return blocks / self._core.spent(work)

    def lookups(self, length: int, blocks: int) -> float:
        prompts = self._prompts[length]

        def work() -> None:
            for _ in range(blocks // length):
                number = self._next()
                self._counts["incomplete"] += length - self._core.ask(number, self._dice.choice(prompts))
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
        self._counts["incomplete"] += len(prompt) // 32 - found
        self._core.recall(number, found)
