"""Copy engine or kernel: what copies this engine's pages soundly, and what is faster, as tried when it starts.

Pages that do not follow each other are written and read back, each way by itself and one after the other: what does not
bring back every byte is not used. The length of a run is given by the layout, so one measurement serves for the
engine's life. The kernel takes processors from the engine, so it must be clearly faster.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np

from stepwell.engines.paged.gpu.device import CopyMethod, Device, Direction
from stepwell.engines.paged.gpu.kernel import WORD
from stepwell.engines.paged.pool import Pool
from stepwell.engines.paged.runs import Places
from stepwell.errors import Unsupported
from stepwell.io.memory import Bytes

log = logging.getLogger("stepwell")

SAMPLE_BYTES = 32 << 20
REPEATS = 5

CLEARLY = 0.8
"""The kernel is chosen where it takes at most so much of the copy engine's time."""


def measure(pool: Pool, device: Device) -> dict[Direction, CopyMethod]:
    """The method for each direction. Pages keep their content, but must not be used meanwhile. Raises Unsupported
    SW-714 where the copy engine does not bring back what was written, and what the device raises."""
    trial = _Trial(pool, device)
    kept = trial.memory()
    trial.copy(Direction.OUT, CopyMethod.ENGINE, kept)
    try:
        if not trial.returns(CopyMethod.ENGINE, CopyMethod.ENGINE):
            raise Unsupported(
                "SW-714",
                what="this GPU cannot be used",
                why="bytes that were copied to its memory and back are not the same",
                fix="run `make test-gpu` of stepwell's repository and report what it finds",
            )
        if not (kernel_can(pool, device) and trial.kernel_is_sound()):
            return dict.fromkeys(Direction, CopyMethod.ENGINE)
        spare = trial.memory()
        return {direction: faster(partial(trial.copy, direction, memory=spare)) for direction in Direction}
    finally:
        trial.copy(Direction.IN, CopyMethod.ENGINE, kept)


class _Trial:
    """Some pages in random order, and memory for them."""

    def __init__(self, pool: Pool, device: Device) -> None:
        self._pool = pool
        self._device = device
        count = max(1, min(SAMPLE_BYTES // pool.page_bytes, pool.num_pages // 2))
        self._pages = random.Random(1).sample(range(pool.num_pages), count)

    def memory(self) -> Bytes:
        return self._device.memory(len(self._pages) * self._pool.page_bytes)

    def copy(self, direction: Direction, method: CopyMethod, memory: Bytes) -> float:
        """Copies the trial's pages; returns seconds."""
        where = Places.side_by_side(memory, self._pages, self._pool.page_bytes)
        began, ended = self._device.enqueue(direction, method, where, self._pool, [self._device.now()])
        ended.wait()
        return self._device.seconds(began, ended)

    def returns(self, into: CopyMethod, out: CopyMethod) -> bool:
        """Whether bytes written by one method are read back by the other."""
        given, back = self.memory(), self.memory()
        given[:] = np.random.default_rng().integers(0, 256, given.nbytes, np.uint8)
        self.copy(Direction.IN, into, given)
        self.copy(Direction.OUT, out, back)
        return np.array_equal(given, back)

    def kernel_is_sound(self) -> bool:
        """Whether the kernel brings back every byte, alone and together with the copy engine. False where there is
        none."""
        try:
            return all(self.returns(into, out) for into, out in product(CopyMethod, CopyMethod))
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the copy engine is there
            log.debug("no copies by a kernel: %s", error)
            return False


def faster(seconds: Callable[[CopyMethod], float]) -> CopyMethod:
    """The method with the smaller median of several copies, taken in turn after one each to warm up."""
    taken = [(seconds(CopyMethod.ENGINE), seconds(CopyMethod.KERNEL)) for _ in range(REPEATS + 1)][1:]
    engine, kernel = (statistics.median(times) for times in zip(*taken, strict=True))
    return CopyMethod.KERNEL if kernel <= CLEARLY * engine else CopyMethod.ENGINE


def kernel_can(pool: Pool, device: Device) -> bool:
    """Whether the kernel reaches registered memory, and all runs are whole words at addresses of words."""
    return device.kernel_reaches and all(
        number % WORD == 0 for span in pool.spans for number in (span.address, span.stride, span.nbytes)
    )
