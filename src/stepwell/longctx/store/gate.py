"""A gate of a store: users are inside, and closing waits until none is. So no thread ever writes to a descriptor whose
number belongs to another file by then."""

from __future__ import annotations

import os
import threading


class StoreGate:
    """A gate around each use: `with gate:`. Raises ValueError if the store is closed, and in a forked child, which
    would seal with nonces that its parent uses too."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._inside = 0
        self._open = True

    def __enter__(self) -> None:
        if self._pid != os.getpid():  # first: the lock may have been held when the process was forked
            raise ValueError("a store of pages cannot be used in a forked process")
        with self._changed:
            if not self._open:
                raise ValueError("this store of pages is closed")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Waits until no user is inside, and admits none from then on. False: another thread has closed it."""
        with self._changed:
            mine, self._open = self._open, False
            self._changed.wait_for(lambda: self._inside == 0)
            return mine
