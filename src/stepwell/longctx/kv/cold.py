"""One copy, in one codec, of all pages of a layer that have stepped down."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from stepwell.errors import StepwellError
from stepwell.longctx.kv.fetch.fetcher import Fetcher
from stepwell.longctx.parts.codec.base import PageCodec
from stepwell.longctx.store.base import PageStore

T = TypeVar("T")


class Once(Generic[T]):
    """Work that the first thread does while others wait for it. All of them get its result, or its error."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._lock = threading.Lock()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        with self._lock:
            if self._work is not None:
                try:
                    self._result = self._work()
                except BaseException as error:  # noqa: BLE001 - raised to all callers
                    self._error = error
                self._work = None  # with what it held

    def result(self) -> T:
        self.run()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class ColdPages:
    """Pages in one codec, numbered from 0 in each lane, the same count in all lanes. Owns its places in the store. Any
    thread may read.

    Where the fetcher reads beside the model, pages are stored beside it, too: they count from the moment they are
    added, and a thread that needs one before its turn stores it itself. An error of storing is raised by a later call,
    and this copy can then only be released.
    """

    def __init__(
        self, codec: PageCodec, store: PageStore, lanes: int, *, device: torch.device, fetcher: Fetcher
    ) -> None:
        self.codec = codec
        self.count = 0
        self.device = device
        self._store, self._fetcher = store, fetcher
        self._lock = threading.RLock()
        self._places = torch.empty(lanes, 0, dtype=torch.int64)
        self._stored = 0
        self._pending: deque[tuple[Once[torch.Tensor], int]] = deque()

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The next m pages of each lane, [L, m, H, P, D]; how many bytes that takes. Raises CapacityError, either now,
        and nothing has changed, or later."""
        payload = self.codec.encode(keys.flatten(0, 1), values.flatten(0, 1)).cpu()
        once = Once(lambda: self._store.put(payload))
        if not self._fetcher.beside:
            once.result()
        with self._lock:
            self._pending.append((once, keys.shape[1]))
            self.count += keys.shape[1]
            if self._fetcher.beside:
                self._fetcher.later(once.run, payload.nbytes)
            self._finish(waiting=False)
        return payload.nbytes

    @property
    def lanes(self) -> int:
        return len(self._places)

    def read(
        self, lanes: torch.Tensor, pages: torch.Tensor, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these pages, [m, H, P, D] each, decoded on `device` (None: the model's). Raises IntegrityError."""
        with self._lock:
            self._finish()
            places = self._places[lanes.cpu(), pages.cpu()]
        at = device if device is not None else self.device
        return self.codec.decode(self._store.get(places).to(at, non_blocking=True))

    def crop(self, pages: int) -> None:
        """Forgets all but the first `pages`."""
        with self._lock:
            self._finish()
            if pages < self.count:
                self._store.free(self._places[:, pages : self.count].flatten())
                self.count = self._stored = pages

    def rows(self, lanes: torch.Tensor) -> None:
        """Makes lane i a copy of lane `lanes[i]`; copies of one lane share its pages."""
        with self._lock:
            self._finish()
            chosen = self._places.index_select(0, lanes.cpu())
            self._store.retain(chosen[:, : self.count].flatten())
            self._store.free(self._places[:, : self.count].flatten())
            self._places = chosen

    def release(self) -> None:
        """Frees all places, even after errors."""
        with self._lock:
            with contextlib.suppress(StepwellError):
                self._finish()
            for once, _ in self._pending:
                with contextlib.suppress(StepwellError):
                    self._store.free(once.result())
            self._pending.clear()
            self._store.free(self._places[:, : self._stored].flatten())
            self.count = self._stored = 0

    def _finish(self, waiting: bool = True) -> None:
        """Notes the places of stored pages, of all if `waiting`; raises the error of storing."""
        while self._pending and (waiting or self._pending[0][0].done):
            once, count = self._pending[0]
            places = once.result().view(-1, count)
            end = self._stored + count
            if end > self._places.shape[1]:
                grown = self._places.new_empty(len(self._places), max(end, self._places.shape[1] * 3 // 2))
                grown[:, : self._stored] = self._places[:, : self._stored]
                self._places = grown
            self._places[:, self._stored : end] = places
            self._stored = end
            self._pending.popleft()
