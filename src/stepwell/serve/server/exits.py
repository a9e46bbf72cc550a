"""Processes of engines whose exit the server waits for, each by a pidfd that came with its hello.

A process is watched until it has exited, also when its connection has ended: until then it may write into slots.
"""

from __future__ import annotations

import os
import selectors
from collections import Counter
from collections.abc import Callable

from stepwell.errors import CapacityError
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.serve.server.connection import Connection
from stepwell.serve.server.listeners import can_watch

MAX_WATCHED = 4096
"""Processes whose exit is awaited, some of them set aside for each tenant; those of ended connections count until they
have exited."""

_TIDY_FROM = 64  # processes; from here on those that matter no more are looked for at each hello


class ExitWatch:
    def __init__(self, hierarchy: Hierarchy, selector: selectors.BaseSelector) -> None:
        self._hierarchy = hierarchy
        self._selector = selector
        self._watched: dict[int, Connection] = {}  # by pidfd

    def __contains__(self, connection: Connection) -> bool:
        return connection.pidfd in self._watched

    def has_room(self, connection: Connection) -> bool:
        """One more process of this connection's tenant can be watched."""
        if len(self._watched) >= _TIDY_FROM:
            self._tidy()
        if len(self._watched) < MAX_WATCHED // 2:
            return True  # more than that is never set aside
        taken = Counter(str(other.tenant) for other in self._watched.values())
        return self._hierarchy.shares.has_room(MAX_WATCHED, taken, str(connection.tenant))

    def watch(self, connection: Connection, exited: Callable[[int], None]) -> bool:
        """Calls `exited` when the process exits. False: the system watches no more."""
        if not can_watch(self._selector, connection.pidfd, exited):
            return False
        self._watched[connection.pidfd] = connection
        return True

    def unwatch(self, connection: Connection) -> None:
        self._selector.unregister(connection.pidfd)
        del self._watched[connection.pidfd]
        discard_pidfd(connection)

    def close(self) -> None:
        for pidfd, connection in self._watched.items():
            if connection.pidfd == pidfd:
                os.close(pidfd)

    def _tidy(self) -> None:
        """Ends the watch over members whose sessions have ended and left nothing that their processes could touch."""
        for connection in list(self._watched.values()):
            if connection.closed and connection.member is not None and not self._hierarchy.watches(connection.member):
                self.unwatch(connection)


def discard_pidfd(connection: Connection) -> None:
    if connection.pidfd >= 0:
        os.close(connection.pidfd)
        connection.pidfd = -1


def too_many(what: str, limit: int) -> CapacityError:
    return CapacityError(
        "SW-204",
        what=f"the well has {limit} {what}",
        why="each costs descriptors and memory",
        fix="stop engines that are not used, or give some of them a home of their own",
    )
