"""A run's fetches once more on a virtual clock: what a link would have hidden on a machine that does nothing else.

Recorded is when the model asked for what and when it needed it, without a limit on the link. Replayed, a link carries
one request at a time, urgent ones first among those that wait, and the model stops where it needs what is not there
yet, which delays all that it does afterwards. No threads, no sleeps: only the model's own pace is measured.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stepwell.longctx.kv.fetch.fetcher import Fetch, Fetcher
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.store.link import ModelledLink

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    at: float
    number: int
    nbytes: int
    urgent: bool


@dataclass(frozen=True, slots=True)
class Need:
    at: float
    number: int


class Recording:
    """In place of a cache's fetcher. `events`: in order of time."""

    def __init__(self, inner: Fetcher, ledger: Ledger) -> None:
        self._inner, self._ledger = inner, ledger
        self._brought = ledger.cold_to_hot()
        self.events: list[Ask | Need] = []

    @property
    def beside(self) -> bool:
        return self._inner.beside

    def start(self, read: Callable[[], T], urgent: bool = True) -> _Recorded[T]:
        brought = self._ledger.cold_to_hot()  # what is asked for is noted there first
        nbytes, self._brought = brought - self._brought, brought
        number = len(self.events)
        self.events.append(Ask(time.perf_counter(), number, nbytes, urgent))
        return _Recorded(self._inner.start(read, urgent), number, self.events)

    def later(self, work: Callable[[], None], nbytes: int) -> None:
        self._inner.later(work, nbytes)

    def close(self) -> None:
        self._inner.close()


class _Recorded(Fetch[T]):
    def __init__(self, inner: Fetch[T], number: int, events: list[Ask | Need]) -> None:
        self._inner, self._number, self._events = inner, number, events

    def result(self) -> T:
        self._events.append(Need(time.perf_counter(), self._number))
        return self._inner.result()


@dataclass(frozen=True, slots=True)
class Replayed:
    """Seconds: that the link was busy, and that the model waited."""

    fetch: float
    stall: float


def replay(events: Sequence[Ask | Need], link: ModelledLink) -> Replayed:
    """Raises KeyError where something is needed that was never asked for. What nobody needed is carried, too, as long
    as the model goes on."""
    waiting: list[tuple[bool, int, float]] = []  # what is urgent sorts first, then by number
    asked: dict[int, float] = {}
    done: dict[int, float] = {}
    free, busy, delay = float("-inf"), 0.0, 0.0

    def carry_one() -> None:
        nonlocal free, busy
        _, number, seconds = heapq.heappop(waiting)
        free = max(free, asked[number]) + seconds
        busy += seconds
        done[number] = free + link.latency

    for event in events:
        now = event.at + delay
        while waiting and free <= now:
            carry_one()
        if isinstance(event, Ask):
            asked[event.number] = now
            heapq.heappush(waiting, (not event.urgent, event.number, event.nbytes / link.bandwidth))
            continue
        while event.number not in done:
            if not waiting:
                raise KeyError(event.number)
            carry_one()
        delay += max(0.0, done[event.number] - now)
    return Replayed(busy, delay)


def recording(cache: Any) -> Recording:
    """From now on all that this cache fetches is noted."""
    found = Recording(cache.setting.fetcher, cache.ledger)
    cache.setting.fetcher = found
    return found
