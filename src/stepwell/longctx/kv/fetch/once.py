"""Work that several threads may reach: done once, by the first of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

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
