"""A device for `engines.paged.gpu` whose queues run late and in any order that they may: what a GPU does now and then,
all the time. It copies between addresses of this process, so pages may be numpy's or torch's.

    with a seed:  whenever it is asked whether something has passed, it does some more, of any queue
    without:      it does nothing that it need not: only what somebody waits for, and what that waits for

The engine's work is what is given to `work`, in a queue like the others; with `at_once` the engine does its work
itself, at the moment, and is made to wait where it is held back. Such an engine is never late, so with `early` copies
out of its pages are as early as they may be instead: they read what was there at the moment that they come after.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepwell.engines.paged.base import Mark
from stepwell.engines.paged.gpu.device import CopyMethod, DeviceEvent, Direction
from stepwell.engines.paged.pool import Pool
from stepwell.engines.paged.runs import Places, pieces
from stepwell.errors import CapacityError
from stepwell.io.memory import Bytes

PART = 64
"""Bytes that are copied at a time."""


class Point:
    """An event of one queue."""

    def __init__(self, device: LateDevice, queue: Queue) -> None:
        self.reached = False
        self.queue = queue
        self.memory: list[tuple[int, bytes]] = []  # what was in the pages then, by address
        self._device = device

    @property
    def passed(self) -> bool:
        self._device.idle()
        return self.reached

    def wait(self) -> None:
        self._device.run_until(self)
        if self._device.broken:
            raise RuntimeError("the device has failed on purpose")

    def seconds_after(self, earlier: Mark) -> float | None:
        return 1e-3 if self.passed else None


@dataclass(eq=False)
class Queue:
    """Work, points to be reached, and points of other queues to be waited for."""

    items: deque[Callable[[], None] | Point] = field(default_factory=deque)


class LateDevice:
    """`early`: the pages of an engine that works at once, to be read as early as may be. `refuses`: calls that are made
    before one is refused; None: none is. `broken`: nothing is known to have been done well any more."""

    kernel_reaches = True

    def __init__(self, seed: int | None = None, *, at_once: bool = False, early: Pool | None = None) -> None:
        self._early = early
        self._random = random.Random(seed) if seed is not None else None
        self._at_once = at_once
        self._lock = threading.RLock()
        self._engine = Queue()
        self._lanes = {direction: Queue() for direction in Direction}
        self._reachable: dict[int, Bytes] = {}  # host memory by address
        self.refuses: int | None = None
        self.broken = False
        self.copied_bytes = 0

    # the device -------------------------------------------------------------------------------------------------------

    def now(self) -> Point:
        with self._lock:
            point = self._mark(self._engine)
            if self._early is not None:
                last = self._early.num_pages - 1
                point.memory = [
                    (row.address, ctypes.string_at(row.address, last * row.stride + row.nbytes))
                    for row in self._early.rows
                ]
            return point

    def hold_back(self, event: DeviceEvent) -> None:
        assert isinstance(event, Point)
        self._refuse()
        with self._lock:
            if self._at_once:
                self.run_until(event)
            else:
                self._engine.items.append(event)

    def enqueue(
        self, direction: Direction, method: CopyMethod, where: Places, pool: Pool, after: Sequence[Mark | DeviceEvent]
    ) -> tuple[DeviceEvent, DeviceEvent]:
        self._refuse()
        with self._lock:
            queue = self._lanes[direction]
            for event in after:
                assert isinstance(event, Point)
                queue.items.append(event)
            began = self._mark(queue)
            first = after[0] if direction is Direction.OUT and len(after) == 1 else None
            then = first.memory if isinstance(first, Point) else []
            for host, device, size in pieces(where, pool).T.tolist():
                for at in range(0, size, PART):
                    copy = self._copy(direction, host + at, device + at, min(PART, size - at), then)
                    if then:
                        copy()
                    else:
                        queue.items.append(copy)
            return began, self._mark(queue)

    def seconds(self, began: DeviceEvent, ended: DeviceEvent) -> float:
        return 1e-3

    def memory(self, nbytes: int) -> Bytes:
        memory = np.zeros(nbytes, np.uint8)
        self._reachable[memory.ctypes.data] = memory
        return memory

    def register(self, memory: Bytes) -> None:
        try:
            self._refuse()
        except RuntimeError as error:
            raise CapacityError("SW-208", what="memory was refused", why=str(error), fix="none") from error
        with self._lock:
            self._reachable[memory.ctypes.data] = memory

    def unregister(self, memory: Bytes) -> None:
        with self._lock:
            del self._reachable[memory.ctypes.data]

    def close(self) -> None:
        pass

    # what tests say ---------------------------------------------------------------------------------------------------

    def work(self, job: Callable[[], None]) -> None:
        """The engine hands over some work."""
        with self._lock:
            self._engine.items.append(job)

    def idle(self) -> None:
        """Some time passes."""
        if self._random is None:
            return
        with self._lock:
            for _ in range(self._random.choice((0, 0, 1, 3, 20, 200))):
                self._some(self._random.choice([self._engine, *self._lanes.values()]))

    def drain(self) -> None:
        """Everything that was handed over is done."""
        with self._lock:
            for queue in (self._engine, *self._lanes.values()):
                self.run_until(self._mark(queue))

    def run_until(self, point: Point) -> None:
        """Does what must be done for this point to be reached, and no more."""
        with self._lock:
            while not point.reached:
                head = point.queue.items[0]
                if isinstance(head, Point) and head.queue is not point.queue:
                    self.run_until(head)
                self._some(point.queue)

    # ------------------------------------------------------------------------------------------------------------------

    def _mark(self, queue: Queue) -> Point:
        point = Point(self, queue)
        if queue is self._engine and self._at_once:
            point.reached = True
        else:
            queue.items.append(point)
        return point

    def _some(self, queue: Queue) -> None:
        """The next item of a queue, if it need not wait."""
        if not queue.items:
            return
        item = queue.items[0]
        if not isinstance(item, Point):
            item()
        elif item.queue is queue:
            item.reached = True
        elif not item.reached:
            return
        queue.items.popleft()

    def _copy(
        self, direction: Direction, host: int, device: int, size: int, then: Sequence[tuple[int, bytes]]
    ) -> Callable[[], None]:
        """`then`: what was in the pages at the moment that the copy comes after, if it is to be as early as that."""

        def copy() -> None:
            if not any(at <= host and host + size <= at + m.nbytes for at, m in self._reachable.items()):
                raise AssertionError("memory was copied that is not registered")
            held = next((m[device - at : device - at + size] for at, m in then if 0 <= device - at < len(m)), None)
            target, source = (host, device) if direction is Direction.OUT else (device, host)
            ctypes.memmove(target, source if held is None else held, size)
            self.copied_bytes += size

        return copy

    def _refuse(self) -> None:
        if self.refuses is not None:
            self.refuses -= 1
            if self.refuses < 0:
                raise RuntimeError("refused on purpose")
