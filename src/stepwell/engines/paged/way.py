"""Copy engine or kernel: what is faster for this engine's pages, as measured when it starts.

The length of a run is given by the layout, so one measurement serves for the engine's life: pages that do not follow
each other are copied to memory of our own and back, in both ways, each direction by itself. The kernel takes
processors from the engine, so it must be clearly faster.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial

from stepwell.engines.paged.device import Device, Direction, Way
from stepwell.engines.paged.kernel import WORD
from stepwell.engines.paged.pool import Pool
from stepwell.engines.paged.runs import Places

SAMPLE_BYTES = 32 << 20
REPEATS = 5

CLEARLY = 0.8
"""The kernel is chosen where it takes at most so much of the copy engine's time."""


def measure(pool: Pool, device: Device) -> dict[Direction, Way]:
    """The way of each direction. Pages keep what is in them, but nobody may write them meanwhile. Raises what the
    device raises."""
    if not kernel_can(pool):
        return dict.fromkeys(Direction, Way.ENGINE)
    count = max(1, min(SAMPLE_BYTES // pool.page_bytes, pool.num_pages // 2))
    pages = random.Random(1).sample(range(pool.num_pages), count)
    memory = device.memory(count * pool.page_bytes)
    where = Places.side_by_side(memory, pages, pool.page_bytes)

    def seconds(direction: Direction, way: Way) -> float:
        began, ended = device.enqueue(direction, way, where, pool, [device.now()])
        ended.wait()
        return device.seconds(began, ended)

    # Out before in: what comes back is what was there.
    return {direction: faster(partial(seconds, direction)) for direction in (Direction.OUT, Direction.IN)}


def faster(seconds: Callable[[Way], float]) -> Way:
    """By the medians of several, after one each to warm up, taken in turn. A kernel that fails is none."""
    try:
        taken = [(seconds(Way.ENGINE), seconds(Way.KERNEL)) for _ in range(REPEATS + 1)][1:]
    except (ImportError, RuntimeError):
        seconds(Way.ENGINE)  # raises if it is the device that fails
        return Way.ENGINE
    engine, kernel = (statistics.median(times) for times in zip(*taken, strict=True))
    return Way.KERNEL if kernel <= CLEARLY * engine else Way.ENGINE


def kernel_can(pool: Pool) -> bool:
    """All runs are of whole words, at such addresses."""
    return all(number % WORD == 0 for span in pool.spans for number in (span.address, span.stride, span.nbytes))
