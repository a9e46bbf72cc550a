"""The listening sockets: each accepts a few connections a turn, and none while the system has no descriptors left."""

from __future__ import annotations

import functools
import logging
import selectors
import socket
from collections.abc import Callable, Sequence

from stepwell.io.clock import Clock
from stepwell.log import RateLimited
from stepwell.serve.server.connection import Connection
from stepwell.serve.server.gates import Gate

_ACCEPTS = 16
_DEAF_SECONDS = 1.0

log = logging.getLogger("stepwell.serve")
limited = RateLimited(log)


class Listeners:
    """Waits at `gates`; `admit` is called with each new connection."""

    def __init__(
        self,
        gates: Sequence[Gate],
        selector: selectors.BaseSelector,
        clock: Clock,
        admit: Callable[[Connection], None],
    ) -> None:
        self._gates = gates
        self._selector = selector
        self._clock = clock
        self._admit = admit
        self._deaf_until: float | None = None
        for gate in gates:
            gate.listener.setblocking(False)
            selector.register(gate.listener, selectors.EVENT_READ, functools.partial(self._accept, gate))

    @property
    def deaf_until(self) -> float | None:
        """When `keep_time` listens again; None while it listens."""
        return self._deaf_until

    def keep_time(self, now: float) -> None:
        """Listens again at all gates, or, while the system does not watch them all, at none for another moment."""
        if self._deaf_until is None or now < self._deaf_until:
            return
        heard = [
            gate
            for gate in self._gates
            if can_watch(self._selector, gate.listener, functools.partial(self._accept, gate))
        ]
        if len(heard) == len(self._gates):
            self._deaf_until = None
            return
        for gate in heard:
            self._selector.unregister(gate.listener)
        self._deaf_until = now + _DEAF_SECONDS

    def descriptor_freed(self) -> None:
        """A connection has closed, so that one that waits may be accepted at once."""
        if self._deaf_until is not None:
            self._deaf_until = self._clock.now()

    def close(self) -> None:
        for gate in self._gates:
            gate.listener.close()

    def _accept(self, gate: Gate, _: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _ = gate.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors: waiting connections stay readable, so look away for a moment
                limited.log(logging.WARNING, "accept", "connections cannot be accepted: %s", error)
                if self._deaf_until is None:
                    for each in self._gates:
                        self._selector.unregister(each.listener)
                self._deaf_until = self._clock.now() + _DEAF_SECONDS
                return
            self._admit(Connection(sock, gate))


def can_watch(selector: selectors.BaseSelector, what: socket.socket | int, call: Callable[[int], None]) -> bool:
    """Registers `call` for when `what` can be read. False: the system watches no more, being out of memory or of
    epoll's max_user_watches."""
    try:
        selector.register(what, selectors.EVENT_READ, call)
    except OSError as error:
        limited.log(logging.WARNING, "watch", "no more connections can be watched: %s", error)
        return False
    return True
