"""Reads cold pages beside the model's computation, and tells how much of that time the model did not notice."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, PriorityQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

from stepwell.errors import ConfigError
from stepwell.longctx.ledger import Ledger

T = TypeVar("T")
_WAITING_BYTES = 64 << 20


class Fetch(Generic[T]):
    """A result that is on its way."""

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
        self._closed = False
        self._thread: Thread | None = None
        if beside:
            self._thread = Thread(target=_serve, args=(self._queue,), name="stepwell-fetch", daemon=True)
            self._thread.start()

    @property
    def beside(self) -> bool:
        return self._thread is not None

    def start(self, read: Callable[[], T], urgent: bool = True) -> Fetch[T]:
        """Raises ConfigError SW-133 where it is closed, now or, if that happens before its turn, with the result."""
        future: Future[T] = Future()
        if self._thread is not None:
            rank = 0 if urgent else 1
            with self._lock:
                if self._closed:
                    raise _closed()
                run, drop = partial(self._run, read, future), partial(_refuse, future)
                self._queue.put(_Request(rank, next(self._count), run, drop))
        else:
            began = time.perf_counter()
            self._run(read, future)
            self._ledger.seconds["stall"] += time.perf_counter() - began
        return Fetch(future, self._ledger)

    def later(self, work: Callable[[], None], nbytes: int) -> None:
        """Does this when nothing is to be read; at once, here, if more than 64 MiB are waiting already. `work` does not
        raise. Where it is closed before its turn it is left out."""

        def run() -> None:
            work()
            with self._lock:
                self._waiting -= nbytes

        with self._lock:
            beside = self._thread is not None and not self._closed and self._waiting + nbytes <= _WAITING_BYTES
            if beside:
                self._waiting += nbytes
                self._queue.put(_Request(2, next(self._count), run))
        if not beside:
            work()

    def close(self) -> None:
        """Waits for reads that have begun; others are dropped, and their waiters get an error. Idempotent."""
        if self._thread is None:
            return
        with self._lock:
            self._closed = True
            self._queue.put(_Request(-1, next(self._count), None))
        self._thread.join()
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait().drop()

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
    drop: Callable[[], None] = field(default=lambda: None, compare=False)


def _serve(queue: PriorityQueue[_Request]) -> None:
    while (request := queue.get()).run is not None:
        request.run()


def _refuse(future: Future[T]) -> None:
    future.set_exception(_closed())


def _closed() -> ConfigError:
    return ConfigError(
        "SW-133",
        what="pages of a long context cannot be fetched",
        why="its cache was closed meanwhile",
        fix="close a cache when no generation uses it any more",
    )
