"""Hooks that fail open: an exception in one would end the engine, so it is caught, reported and answered as a miss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Hooked(Protocol):
    """An object with hooks, such as a connector."""

    def _caught(self, hook: str, error: Exception) -> None:
        """Reports an exception in a hook. Raises nothing."""

    def _go_without(self, request: Any) -> None:
        """Leaves the request that an exception was about without stepwell."""


def guarded(answer: Any, *, again: bool = False) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes a hook fail open: an exception is logged (rate-limited), counted, and answered with `answer`. `again`: the
    hook is called once more before that."""

    def wrap(hook: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(hook)
        def open_hook(self: Hooked, *args: Any, **kwargs: Any) -> T:
            for _ in range(2 if again else 1):
                try:
                    return hook(self, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the boundary to the engine: a hook that raises ends it
                    self._caught(hook.__name__, error)
                    if args and hasattr(args[0], "request_id"):
                        self._go_without(args[0])
            return answer  # type: ignore[no-any-return]

        return open_hook

    return wrap
