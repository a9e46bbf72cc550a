"""A thread for work that may hang for ever, such as a write to a filesystem that does not answer.

Callers wait for the work only as long as they choose to. Standard library only.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable


class Background:
    """Calls `work`, which may block and must not raise, at least once after each `wake`, never twice at the same time.
    The owner keeps the work and bounds its queue. The thread keeps no process alive. Raises OSError EAGAIN where the
    system gives no thread."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._news = threading.Condition()
        self._asked = 0
        self._done = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # all that Python says
            raise OSError(errno.EAGAIN, str(error)) from error

    def wake(self) -> None:
        """Requests a run of `work`. Any thread."""
        with self._news:
            self._asked += 1
            self._news.notify_all()

    def settle(self, seconds: float) -> bool:
        """Waits until all requested work is done. False: it was not, in that time."""
        with self._news:
            asked = self._asked
            return self._news.wait_for(lambda: self._done >= asked, max(0.0, seconds))

    def close(self, seconds: float) -> bool:
        """Ends the thread when all requested work is done. False: it hangs, and is not waited for any longer."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._asked > self._done or self._closed)
                if self._asked == self._done:
                    return
                asked = self._asked
            self._work()
            with self._news:
                self._done = asked
                self._news.notify_all()
