"""Reads cold pages beside the model's computation, and tells how much of that time the model did not notice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import PriorityQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

from stepwell.longctx.ledger import Ledger

T = TypeVar("T")
_WAITING_BYTES = 64 << 20


class Fetch(Generic[T]):
    """Something on its way."""

    def __init__(self, future: Future[T], ledger: Ledger) -> None:
        self._future = future
        self._ledger = ledger

    def result(self) -> T:
        """Waits for it; raises what it raised."""
        began = time.perf_counter()
        try:
            return self._future.result()
        finally:
            self._ledger.seconds["stall"] += time.perf_counter() - began


class Fetcher:
    """`beside`: with a thread of its own; else reading is done where it is asked for, which is faster for memory on
    few cores. Urgent requests overtake others that have not begun, and those overtake what is for later; among equals,
    order is kept."""

    def __init__(self, ledger: Ledger, *, beside: bool) -> None:
        self._ledger = ledger
        self._queue: PriorityQueue[_Request] = PriorityQueue()
        self._count = itertools.count()
        self._lock = Lock()
        self._waiting = 0
        self._thread: Thread | None = None
        if beside:
            self._thread = Thread(target=_serve, args=(self._queue,), name="stepwell-fetch", daemon=True)
            self._thread.start()

    @property
    def beside(self) -> bool:
        return self._thread is not None

    def start(self, read: Callable[[], T], urgent: bool = True) -> Fetch[T]:
        future: Future[T] = Future()
        if self._thread is not None:
            self._queue.put(_Request(0 if urgent else 1, next(self._count), lambda: self._run(read, future)))
        else:
            began = time.perf_counter()
            self._run(read, future)
            self._ledger.seconds["stall"] += time.perf_counter() - began
        return Fetch(future, self._ledger)

    def later(self, work: Callable[[], None], nbytes: int) -> None:
        """Does this when nothing is to be read; at once, here, if more than 64 MiB are waiting already. `work` does not
        raise."""
        with self._lock:
            beside = self._thread is not None and self._waiting + nbytes <= _WAITING_BYTES
            self._waiting += nbytes if beside else 0
        if not beside:
            work()
            return

        def run() -> None:
            work()
            with self._lock:
                self._waiting -= nbytes

        self._queue.put(_Request(2, next(self._count), run))

    def close(self) -> None:
        """What has not begun is not read any more; waits for what has. Idempotent."""
        if self._thread is not None:
            self._queue.put(_Request(-1, next(self._count), None))
            self._thread.join()

    def _run(self, read: Callable[[], T], future: Future[T]) -> None:
        began = time.perf_counter()
        try:
            future.set_result(read())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        self._ledger.fetched(time.perf_counter() - began)


@dataclass(order=True, slots=True)
class _Request:
    rank: int
    number: int
    run: Callable[[], None] | None = field(compare=False)


def _serve(queue: PriorityQueue[_Request]) -> None:
    while (request := queue.get()).run is not None:
        request.run()
