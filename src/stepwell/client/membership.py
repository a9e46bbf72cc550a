"""Keeps one member of a session connected to its well, in the background.

A lost link is rejoined by a new session within seconds; until then the engine side answers misses. Errors are told
once per cause, never raised: the engine goes on. An attempt that raises, whatever it is, has failed; another follows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from stepwell.client.refusal import refusal
from stepwell.errors import StepwellError
from stepwell.protocol.link import Dial, Link, Receiver
from stepwell.protocol.messages import FromWell, Hello, Message

FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0
"""Seconds between attempts to join: doubled from the first to the longest."""

SILENT_WAIT = 0.05
"""Seconds until the next look whether there is something to say."""

PERSON_WAIT = 60.0
"""Seconds until the next attempt where a person must act first: settings, shapes, permissions, an unsuited system."""

Trouble = Callable[[StepwellError], None]


class Membership:
    """Joins, and joins again. `hello` returns None while there is nothing to say yet; `find` returns how to reach the
    well and may start one. Both run on the membership's thread and may block."""

    def __init__(
        self,
        hello: Callable[[], Hello | None],
        find: Callable[[], Dial],
        receiver: Receiver,
        trouble: Trouble,
    ) -> None:
        self._hello = hello
        self._find = find
        self._receiver = receiver
        self._trouble = trouble
        self._outbox: Outbox | None = None
        self._told = ""
        self._wait = FIRST_WAIT
        self._lost = threading.Event()
        self._lost.set()
        self._closed = threading.Event()

    def begin(self, *, threaded: bool) -> None:
        """Starts joining in the background; without a thread (in-process wells, tests) it tries once, and again
        whenever someone calls `attempt`."""
        if threaded:
            threading.Thread(target=self._run, name="stepwell-join", daemon=True).start()
        else:
            self.attempt()

    @property
    def outbox(self) -> Outbox | None:
        """Where messages of the present link go. Whoever posts for a session takes it *before* comparing sessions: then
        a message goes to the link that it was meant for, or nowhere."""
        return self._outbox

    def attempt(self) -> bool:
        """One try to join. True if a link is up (its answer may still be to come). Raises only what must be a bug."""
        if self._outbox is not None or self._closed.is_set():
            return self._outbox is not None
        link: Link | None = None
        try:
            hello = self._hello()
            if hello is None:
                return False
            self._lost.clear()
            self._outbox = outbox = Outbox()
            link = self._find()(hello, _Relay(self))
            outbox.open(link)
        except BaseException as error:
            if link is not None:
                link.close()  # which tells us that it is lost
            else:
                self._outbox = None
                self._lost.set()
            if not isinstance(error, StepwellError | OSError):
                raise
            self._failed(error)
            return False
        if self._closed.is_set():  # while dialling
            outbox.close()
        return self._outbox is not None

    def _failed(self, error: Exception) -> None:
        self.trouble(error if isinstance(error, StepwellError) else refusal(error))

    def trouble(self, error: StepwellError) -> None:
        """Tells each cause once until another one, or success, comes between."""
        if error.code != self._told:
            self._told = error.code
            self._trouble(error)

    def settled(self) -> None:
        """The session is complete: the next trouble is news again, and the next loss is answered quickly."""
        self._told = ""
        self._wait = FIRST_WAIT

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._go_on()
            except Exception as error:  # noqa: BLE001 - this thread must not end: the engine would never join again
                with contextlib.suppress(Exception):
                    self._failed(error)
                self._back_off()

    def _go_on(self) -> None:
        """Joins, waits while that lasts, and then for when to try again."""
        self.attempt()
        self._lost.wait()
        if self._hello() is None:
            self._closed.wait(SILENT_WAIT)
        elif self._told[3:4] in ("1", "6", "7") or self._told == "SW-401":
            self._closed.wait(PERSON_WAIT)
        else:
            self._back_off()

    def _back_off(self) -> None:
        self._closed.wait(self._wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT)

    def received(self, message: FromWell, fds: Sequence[int]) -> None:
        self._receiver.received(message, fds)

    def lost(self) -> None:
        self._outbox = None
        try:
            self._receiver.lost()
        finally:
            self._lost.set()

    def close(self) -> None:
        """Leaves for good."""
        self._closed.set()
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.close()
        self._lost.set()


class Outbox:
    """The way to one link. Keeps what is posted while the link is being opened: its first answers, and what they make
    the receiver say, may come before the call that opens it has returned."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._early: list[Message] = []
        self._link: Link | None = None

    def post(self, message: Message) -> None:
        """Never blocks; discarded when the link is lost."""
        link = self._link
        if link is None:
            with self._lock:
                link = self._link
                if link is None:
                    self._early.append(message)
                    return
        link.post(message)

    def open(self, link: Link) -> None:
        with self._lock:
            for message in self._early:
                link.post(message)
            self._early.clear()
            self._link = link

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class _Relay:
    """What a link sees of its membership."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def received(self, message: FromWell, fds: Sequence[int]) -> None:
        self._membership.received(message, fds)

    def lost(self) -> None:
        self._membership.lost()
