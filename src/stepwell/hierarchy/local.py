"""A well in the same process: `stepwell.open()`.

For libraries, tests and tools. The hierarchy stays single-threaded behind one lock; jobs run inline, so everything a
call causes has happened when it returns. Nothing survives the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.errors import BackendDown
from stepwell.hierarchy import audit
from stepwell.hierarchy.core import Limits
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.io.clock import Clock, MonotonicClock
from stepwell.io.executor import Executor
from stepwell.io.memory import Memory, SystemMemory
from stepwell.policies.decide import Mode
from stepwell.protocol.link import Link, Receiver
from stepwell.protocol.messages import FromEngine, FromWell, Hello, Message
from stepwell.units import parse_size
from stepwell.vault.keyring import Keyring


class InlineExecutor:
    """Runs each job at once; its completion is delivered by the next pump."""

    def __init__(self) -> None:
        self.completions: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            job()
        except Exception as raised:  # noqa: BLE001 - an executor hands every failure to its caller
            error = raised
        self.completions.append(lambda: done(error))


class LocalWell:
    """A well behind a lock. `dial` is what engine-side classes take instead of a socket."""

    def __init__(
        self, hierarchy: Hierarchy, executor: InlineExecutor | None = None, lock: threading.RLock | None = None
    ) -> None:
        self.hierarchy = hierarchy
        self._executor = executor
        self._lock = lock or threading.RLock()
        self._deliveries: deque[Callable[[], None]] = deque()
        self._pumping = False
        self._closed = False

    def dial(self, hello: Hello, receiver: Receiver) -> Link:
        """Joins as a member of this process. Raises BackendDown after `close`."""
        link = _LocalLink(self, receiver)
        with self._lock:
            if self._closed:
                raise BackendDown("SW-505", what="the well is closed", why="it was closed", fix="open another")
            peer = Peer(os.getuid(), os.getpid(), watched=True, tenant=DEFAULT_TENANT)
            link.member = self.hierarchy.join(peer, hello, link.deliver, link.sever)
            if link.member is None:
                link.sever()
        self.pump()
        return link

    def handle(self, member: Member, message: FromEngine) -> None:
        with self._lock:
            self.hierarchy.handle(member, message)
        self.pump()

    def leave(self, member: Member, *, exited: bool) -> None:
        """`exited`: the member promises that it copies no more, as if its process had ended."""
        with self._lock:
            (self.hierarchy.exited if exited else self.hierarchy.left)(member)
        self.pump()

    def later(self, delivery: Callable[[], None]) -> None:
        self._deliveries.append(delivery)

    def pump(self) -> None:
        """Runs the hierarchy until it has nothing to do. Deliveries may call back in; they are queued, not nested."""
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
            try:
                more = True
                while more:
                    more = self.hierarchy.turn()
                    while self._executor is not None and self._executor.completions:
                        self._executor.completions.popleft()()
                        more = True
                    while self._deliveries:
                        self._deliveries.popleft()()
                        more = True
            finally:
                self._pumping = False

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            return self.hierarchy.stats()

    def check(self) -> None:
        """Raises IntegrityError unless all books balance."""
        with self._lock:
            audit.hierarchy(self.hierarchy)

    def close(self) -> None:
        """Ends all sessions and frees the shared memory."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.hierarchy.close()
        self.pump()

    def __enter__(self) -> LocalWell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LocalLink:
    def __init__(self, well: LocalWell, receiver: Receiver) -> None:
        self._well = well
        self._receiver = receiver
        self._ended = False
        self.member: Member | None = None

    def post(self, message: Message) -> None:
        if self.member is not None and not self._ended:
            self._well.handle(self.member, message)  # type: ignore[arg-type]

    def close(self) -> None:
        """In one process a closed link is a promise that its owner copies no more."""
        if self.member is not None and not self._ended:
            self._well.leave(self.member, exited=True)
        self.end()

    def deliver(self, message: Message, fds: Sequence[int]) -> None:
        copies = [os.dup(fd) for fd in fds]
        self._well.later(lambda: self._received(message, copies))

    def _received(self, message: Message, fds: list[int]) -> None:
        if not self._ended:
            self._receiver.received(message, fds)  # type: ignore[arg-type]
            return
        for fd in fds:
            os.close(fd)

    def sever(self) -> None:
        """The well ends the link, after what it has said."""
        self._well.later(self.end)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._receiver.lost()


def open_well(
    host: str | int = "256MiB",
    *,
    home: Path | None = None,
    clock: Clock | None = None,
    memory: Memory | None = None,
    recall: Mode = Mode.DEFAULT,
) -> LocalWell:
    """A well in this process with `host` bytes of shared memory. Its keys are those of `home`, or made up for this
    process where no home is given. `recall`: whether blocks are recalled that may be cheaper to compute, as the setting
    of this name. Raises StepwellError for sizes and homes that cannot be used."""
    executor = InlineExecutor()
    keyring = Keyring.open(home / "keyring") if home is not None else Keyring.ephemeral()
    checked: Executor = executor
    hierarchy = Hierarchy(
        limits=Limits(parse_size(host)),
        sealing=Sealing(keyring, sealed=True, wall=time.time),
        clock=clock or MonotonicClock(),
        executor=checked,
        memory=memory or SystemMemory(),
        well="in-process",
        recall=recall,
    )
    return LocalWell(hierarchy, executor)


__all__ = ["FromWell", "InlineExecutor", "LocalWell", "open_well"]
