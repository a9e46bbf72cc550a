"""The well's one thread: sockets, exits of processes, completions and the state machine's slices, in short turns.

Plain `selectors`, because descriptors are passed and microseconds count. The loop decides who may speak (same user,
known protocol, a hello in time) and for how long one peer is listened to; what engines say goes to the hierarchy. Every
call into the hierarchy comes from here, none from inside another one: connections that it closes are reported to it
at the end of the round.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stepwell.errors import AccessDenied, CapacityError, ProtocolError, StepwellError
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.session import Member, Peer
from stepwell.io.clock import Clock
from stepwell.log import RateLimited
from stepwell.protocol.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    FromEngine,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Stats,
    StatsQuery,
    Stop,
    Stopping,
    Welcome,
)
from stepwell.serve.connection import Connection, is_pidfd
from stepwell.serve.executor import ThreadExecutor, Wakeup

MAX_CONNECTIONS = 1024
MAX_WATCHED = 4096
"""Processes whose exit is awaited; those of ended connections count until they have exited."""

HELLO_SECONDS = 2.0
GRACE_SECONDS = 5.0
"""A new well waits at least this long for the engine that started it."""

_SLICE_SECONDS = 0.001  # after this much of a round nothing new is begun that can wait for the next round
_ACCEPTS = 16
_DEAF_SECONDS = 1.0
_GC_IDLE, _GC_BUSY, _GC_AFTER_SECONDS = 500, 5000, 0.25  # 5000 young objects are looked through in about 0.3 ms

log = logging.getLogger("stepwell.serve")
limited = RateLimited(log)


@dataclass(frozen=True, slots=True)
class Linger:
    """Seconds that a well without sessions stays while it holds blocks, and while it does not."""

    blocks: float
    empty: float


class Loop:
    """Serves `listener`, which is closed when `run` returns. Without `linger` only `stop` ends it."""

    def __init__(
        self, hierarchy: Hierarchy, listener: socket.socket, clock: Clock, executor: ThreadExecutor, wakeup: Wakeup,
        *, linger: Linger | None = None,
    ) -> None:  # fmt: skip
        self._hierarchy = hierarchy
        self._listener = listener
        self._clock = clock
        self._executor = executor
        self._wakeup = wakeup
        self._linger = linger
        self._uid = os.geteuid()
        self._why = ""
        self._connections: set[Connection] = set()
        self._watched: dict[int, Connection] = {}  # by pidfd
        self._unread: deque[Connection] = deque()
        self._unsent: list[Connection] = []
        self._severed: list[Connection] = []
        self._overdue: deque[tuple[float, Connection]] = deque()  # in order of time
        self._deaf_until: float | None = None
        self._idle_since: float | None = clock.now() + GRACE_SECONDS
        self._until = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._watch(listener, self._accept)
        self._watch(wakeup, self._woken)

    def stop(self, why: str) -> None:
        """Ends `run` after the current round. For the loop's own thread and for signal handlers."""
        self._why = self._why or why

    def run(self) -> str:
        """Serves until it is stopped or nobody needs it; says which. Collects garbage itself: it is off meanwhile."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            more = False
            while not self._why:
                events = self._selector.select(0 if more else self._patience())
                more = self._round(events)
                self._collect(idle=not events and not more)
            return self._why
        finally:
            self._close()
            if was_enabled:
                gc.enable()

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _round(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """One turn over everything that is ready. True: there is more to do at once."""
        self._until = self._clock.now() + _SLICE_SECONDS
        for key, mask in events:
            key.data(mask)
        for _ in range(len(self._unread)):
            connection = self._unread.popleft()
            if connection.unread is not None:
                self._handle(connection, connection.unread)
            if self._clock.now() >= self._until:
                break
        self._end_severed()
        self._keep_time()
        more = self._executor.complete(self._clock, self._until)
        more = self._hierarchy.turn() or more
        self._send_all()
        return more or bool(self._unread) or bool(self._severed)

    def _patience(self) -> float | None:
        """Seconds until time alone gives us something to do; None: never."""
        moments = [moment for moment in (self._deaf_until, self._leaves_at()) if moment is not None]
        if self._overdue:
            moments.append(self._overdue[0][0])
        if gc.get_count()[0] > _GC_IDLE:
            moments.append(self._clock.now() + _GC_AFTER_SECONDS)
        return max(0.0, min(moments) - self._clock.now()) if moments else None

    def _keep_time(self) -> None:
        now = self._clock.now()
        while self._overdue and (self._overdue[0][0] <= now or self._is_settled(self._overdue[0][1])):
            _, connection = self._overdue.popleft()
            if not self._is_settled(connection):
                self._drop(connection)
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
            self._watch(self._listener, self._accept)
        if self._hierarchy.sessions:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        leaves_at = self._leaves_at()
        if leaves_at is not None and now >= leaves_at:
            self.stop("no engine has used it for a while")

    def _leaves_at(self) -> float | None:
        if self._linger is None or self._idle_since is None:
            return None
        return self._idle_since + (self._linger.blocks if self._hierarchy.holds_blocks else self._linger.empty)

    def _collect(self, *, idle: bool) -> None:
        # Only the youngest generation: the index may be millions of objects, and nothing in it is cyclic garbage.
        if gc.get_count()[0] > (_GC_IDLE if idle else _GC_BUSY):
            gc.collect(0)

    def _woken(self, _: int) -> None:
        self._wakeup.clear()

    def _watch(self, what: socket.socket | Wakeup | int, call: Callable[[int], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, call)

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors: waiting connections stay readable, so look away for a moment
                limited.log(logging.WARNING, "accept", "connections cannot be accepted: %s", error)
                self._selector.unregister(self._listener)
                self._deaf_until = self._clock.now() + _DEAF_SECONDS
                return
            self._admit(Connection(sock))

    def _admit(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._watch(connection.sock, functools.partial(self._ready, connection))
        self._overdue.append((self._clock.now() + HELLO_SECONDS, connection))
        if connection.uid != self._uid:
            self._refuse(connection, AccessDenied(
                "SW-606", what=f"this well serves user {self._uid}, not user {connection.uid}",
                why="a well holds its user's data in plain memory",
                fix="run engine and well as the same user, or give this user a home of its own",
            ))  # fmt: skip
        elif len(self._connections) > MAX_CONNECTIONS:
            self._refuse(connection, _too_many("connections", MAX_CONNECTIONS))

    def _ready(self, connection: Connection, mask: int) -> None:
        if connection.closed:
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ or connection.unread is not None or connection.closed:
            return
        try:
            messages = connection.receive()
        except BlockingIOError:
            return
        except OSError:
            messages = None
        if messages is None:
            self._drop(connection)
        elif not connection.ending:
            self._handle(connection, messages)

    def _handle(self, connection: Connection, messages: Iterator[FromEngine]) -> None:
        """As many messages as fit into the round, at least one; the rest waits before more is read."""
        connection.unread = None
        try:
            for message in messages:
                self._take(connection, message)
                if connection.ending or connection.closed:
                    return
                if self._clock.now() >= self._until:
                    connection.unread = messages
                    self._unread.append(connection)
                    return
            if connection.overlong_hello:
                raise ProtocolError("SW-802", what="the first message is too long", why="a hello is short",
                                    fix="use the same stepwell version for engine and well")  # fmt: skip
        except ProtocolError as error:
            self._refuse(connection, error)
        finally:
            self._send_all()

    def _take(self, connection: Connection, message: FromEngine) -> None:
        if isinstance(message, Ping) and connection.greeted:
            self._send(connection, Pong(message.number))
        elif connection.member is not None:
            self._hierarchy.handle(connection.member, message)
        elif isinstance(message, Hello) and not connection.admin:
            self._greet(connection, message)
        elif isinstance(message, StatsQuery) and connection.admin:
            self._send(connection, Stats(self._stats()))
        elif isinstance(message, Stop) and connection.admin:
            self._send(connection, Stopping())
            self.stop("it was asked to")
        else:
            raise ProtocolError("SW-804", what=f"{type(message).__name__} is not expected here",
                                why="a connection begins with one hello and keeps to its role",
                                fix="use the same stepwell version for engine and well")  # fmt: skip

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if not OLDEST_PROTOCOL <= hello.protocol <= PROTOCOL:
            raise ProtocolError(
                "SW-801", what=f"this side speaks protocol {hello.protocol}, the well {OLDEST_PROTOCOL} to {PROTOCOL}",
                why=f"the well, process {os.getpid()}, is of another version of stepwell: {self._hierarchy.well}",
                fix=f"use the same version for both; `kill {os.getpid()}` ends the well",
            )  # fmt: skip
        if hello.role == "admin":
            connection.admin = True
            self._discard_pidfd(connection)
            self._send(connection, Welcome(0, hello.protocol, self._hierarchy.well, self._hierarchy.limits.host_bytes))
            return
        watched = connection.pidfd >= 0 and is_pidfd(connection.pidfd)
        if watched and len(self._watched) >= MAX_WATCHED:
            self._refuse(connection, _too_many("processes that were connected and still run", MAX_WATCHED))
            return
        send, sever = functools.partial(self._send, connection), functools.partial(self._sever, connection)
        member = self._hierarchy.join(Peer(connection.uid, connection.pid, watched), hello, send, sever)
        if member is None:
            self._end(connection)
            return
        connection.member = member
        if watched:
            self._watched[connection.pidfd] = connection
            self._watch(connection.pidfd, functools.partial(self._exited, connection, member))
        else:
            self._discard_pidfd(connection)

    def _exited(self, connection: Connection, member: Member, _: int) -> None:
        """All threads of the process are gone, even if a forked child keeps its socket open."""
        self._selector.unregister(connection.pidfd)
        del self._watched[connection.pidfd]
        self._discard_pidfd(connection)
        self._hierarchy.exited(member)
        self._drop(connection)

    def _discard_pidfd(self, connection: Connection) -> None:
        if connection.pidfd >= 0:
            os.close(connection.pidfd)
            connection.pidfd = -1

    # --- out ---------------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, message: Message, fds: tuple[int, ...] = ()) -> None:
        if connection.closed or connection in self._severed:
            return
        if connection.queue(message, fds):
            self._unsent.append(connection)
        else:
            limited.log(logging.WARNING, "output", "process %d does not read its answers", connection.pid)
            self._sever(connection)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        if connection.closed:
            return
        try:
            blocked = not connection.flush()
        except OSError:
            self._sever(connection)
            return
        if connection.ending and not blocked:
            self._sever(connection)
        elif blocked != connection.wants_write:
            connection.wants_write = blocked
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
            self._selector.modify(connection.sock, mask, self._selector.get_key(connection.sock).data)

    def _refuse(self, connection: Connection, error: StepwellError) -> None:
        limited.log(logging.WARNING, error.code, "process %d of user %d: %s", connection.pid, connection.uid, error)
        self._send(connection, Refused(error.code, error.what, error.why, error.fix))
        self._end(connection)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, connection: Connection) -> None:
        """Closes the connection when its output is sent, or HELLO_SECONDS later."""
        connection.ending = True
        connection.unread = None
        self._overdue.append((self._clock.now() + HELLO_SECONDS, connection))
        self._unsent.append(connection)

    def _sever(self, connection: Connection) -> None:
        """Drops the connection at the end of the round. The hierarchy calls this in the middle of its own work."""
        self._severed.append(connection)

    def _end_severed(self) -> None:
        severed, self._severed = self._severed, []
        for connection in severed:
            if not connection.closed:
                with contextlib.suppress(OSError):
                    connection.flush()  # its reason may be among what is not sent
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection.closed:
            return
        self._selector.unregister(connection.sock)
        connection.close()
        self._connections.discard(connection)
        if connection.pidfd not in self._watched:
            self._discard_pidfd(connection)
        if connection.member is not None:
            self._hierarchy.left(connection.member)

    def _is_settled(self, connection: Connection) -> bool:
        return connection.closed or (connection.greeted and not connection.ending)

    def _close(self) -> None:
        """Peers see the end of their sockets; nothing is awaited."""
        for connection in self._connections:
            connection.close()
            self._discard_pidfd(connection)
        for pidfd in self._watched:
            if self._watched[pidfd].pidfd == pidfd:
                os.close(pidfd)
        self._selector.close()
        self._listener.close()

    def _stats(self) -> dict[str, int | float | str]:
        return self._hierarchy.stats() | {
            "pid": os.getpid(),
            "connections": len(self._connections),
        }


def _too_many(what: str, limit: int) -> CapacityError:
    return CapacityError("SW-204", what=f"the well has {limit} {what}", why="each costs descriptors and memory",
                         fix="stop engines that are not used, or give some of them a home of their own")  # fmt: skip
