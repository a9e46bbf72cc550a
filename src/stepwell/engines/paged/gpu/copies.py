"""Copies on a GPU: which of them must wait for which, whatever the device.

    the engine's queue   | step 1 | step 2 ..... |held back| step 3
    out                           '-> gather p, q ---------'
    in                                      '-> scatter q' waits for the gather

A copy begins after the engine's work that its caller names, and after copies under way that touch the same pages the
other way round. The engine's own work is held back only where it takes pages that a copy still touches. All of that is
arranged in the device's queues: no thread waits here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence

from stepwell.engines.paged.base import Fetched, Mark, Shard
from stepwell.engines.paged.compare import compare
from stepwell.engines.paged.gpu.device import CopyMethod, Device, DeviceEvent, Direction
from stepwell.engines.paged.pool import Pool
from stepwell.engines.paged.runs import Places, check, check_whole, places
from stepwell.io.memory import Bytes


class Flight:
    """A copy under way: the pages that it touches, and the event of its end. `memory` is kept until then."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        pages: frozenset[int],
        began: DeviceEvent,
        ended: DeviceEvent,
        memory: Bytes | None = None,
    ) -> None:
        self.direction = direction
        self.pages = pages
        self.ended = ended
        self._device = device
        self._began = began
        self._memory = memory

    @property
    def done(self) -> bool:
        return self.ended.passed

    def wait(self) -> None:
        """Raises RuntimeError for a device that has failed."""
        self.ended.wait()

    @property
    def seconds(self) -> float:
        return self._device.seconds(self._began, self.ended) if self.done else 0.0


class GpuCopies:
    """Copies of one rank. `methods`: the faster method of each direction, as measured."""

    inline_bytes = 0
    overlaps = True

    def __init__(self, pool: Pool, device: Device, methods: dict[Direction, CopyMethod]) -> None:
        self.pool = pool
        self.num_pages = pool.num_pages
        self.page_bytes = pool.page_bytes
        self.methods = dict(methods)
        self.device = device
        self._lock = threading.Lock()  # what is looked up in `_flights` is enqueued behind before another one is added
        self._flights: list[Flight] = []

    def now(self) -> Mark:
        return self.device.now()

    def gather(self, shards: Sequence[Shard], after: Mark) -> Flight:
        for shard in shards:
            check_whole(shard, self.page_bytes)
        return self._copy(Direction.OUT, shards, after)

    def scatter(self, shards: Sequence[Shard], after: Mark) -> Flight:
        return self._copy(Direction.IN, shards, after)

    def _copy(self, direction: Direction, shards: Sequence[Shard], after: Mark) -> Flight:
        for shard in shards:
            check(shard, self.num_pages, self.page_bytes)
        return self._fly(direction, places(shards, self.page_bytes), after)

    def fetch(self, pages: Sequence[int], after: Mark) -> Fetched:
        if not all(0 <= page < self.num_pages for page in pages):
            raise IndexError(f"pages {list(pages)} of {self.num_pages}")
        memory = self.device.memory(len(pages) * self.page_bytes)
        flight = self._fly(Direction.OUT, Places.side_by_side(memory, pages, self.page_bytes), after, memory)
        return Fetched(flight, memory.reshape(len(pages), self.page_bytes))

    def _fly(self, direction: Direction, where: Places, after: Mark, memory: Bytes | None = None) -> Flight:
        pages = frozenset(where.pages.tolist())
        ended: DeviceEvent | None = None
        try:
            with self._lock:
                # Its own direction keeps its order by itself.
                others = [f.ended for f in self._touching(pages) if f.direction is not direction]
                began, ended = self.device.enqueue(
                    direction, self.methods[direction], where, self.pool, [after, *others]
                )
                flight = Flight(self.device, direction, pages, began, ended, memory)
                self._flights.append(flight)
                return flight
        except Exception:
            if ended is not None:
                ended.wait()  # no caller learns of it
            raise

    def hold_back(self, pages: Collection[int]) -> None:
        """Waits only where the device refuses to."""
        with self._lock:
            for flight in self._touching(pages):
                try:
                    self.device.hold_back(flight.ended)
                except Exception:  # noqa: BLE001 - whatever it is, the engine must not write there yet
                    flight.ended.wait()

    def _touching(self, pages: Collection[int]) -> list[Flight]:
        """Copies under way that touch these pages; those that have ended are forgotten here."""
        self._flights = [flight for flight in self._flights if not flight.done]
        return [flight for flight in self._flights if not flight.pages.isdisjoint(pages)]

    def errors(self, fresh: Bytes, stored: Bytes) -> list[float]:
        return compare(fresh, stored, self.pool.rows)

    @property
    def prepare(self) -> Callable[[Bytes], Callable[[], None]] | None:
        return self._register

    def _register(self, memory: Bytes) -> Callable[[], None]:
        self.device.register(memory)
        return functools.partial(self.device.unregister, memory)

    def close(self) -> None:
        self.device.close()
