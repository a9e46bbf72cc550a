"""The well's server: who may connect, what each connection may say, how long it may wait, and what goes out again.

Owns the connections. It decides by user, protocol version and a hello in time; what engines say after that goes to the
hierarchy. Calls into the hierarchy are never nested: connections that it closes in the middle of its work are reported
to it by `end_severed`. Nothing here blocks; called by `serve.loop` only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import selectors
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from stepwell.block.tier import WellStats
from stepwell.errors import AccessDenied, ProtocolError, StepwellError
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.session import Peer, Session, SessionPhase
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
    Welcome,
)
from stepwell.serve.server import admin
from stepwell.serve.server.connection import Connection, ConnectionChannel, is_pidfd
from stepwell.serve.server.exits import MAX_WATCHED, ExitWatch, discard_pidfd, too_many
from stepwell.serve.server.gates import Gate
from stepwell.serve.server.listeners import Listeners, can_watch

MAX_CONNECTIONS = 1024
"""Connections of all tenants; some are set aside for each."""

MAX_WAITING = 256 << 20
"""Bytes that wait for all peers together, to be read by them or for the rest of their messages; some are set aside for
each tenant. A peer for which little waits is never the one too many."""

_WAITS_A_LOT = 1 << 20

HELLO_SECONDS = 2.0
"""Time for a hello to come, and for a refusal to be read."""

_LAST_WORDS = 256

log = logging.getLogger("stepwell.serve")
limited = RateLimited(log)


class Server:
    """Registers what it waits for with `selector`, each with the function to call. `stop` ends the loop, with a reason.

    `until` is the moment of this round after which nothing new is begun that can wait for the next one.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        gates: Sequence[Gate],
        selector: selectors.BaseSelector,
        clock: Clock,
        stop: Callable[[str], None],
        shell: admin.Shell,
    ) -> None:
        self.until = 0.0
        self._hierarchy = hierarchy
        self._tenants = len({tenant for gate in gates for tenant in gate.tenants.values()})
        self._selector = selector
        self._clock = clock
        self._stop = stop
        self._shell = shell
        self._uid = os.geteuid()
        self._connections: set[Connection] = set()
        self._commands = admin.Commands()
        self._unread: deque[Connection] = deque()
        self._unsent: list[Connection] = []
        self._severed: list[Connection] = []
        self._overdue: deque[tuple[float, Connection]] = deque()  # in order of time
        self._refused = 0
        self._exits = ExitWatch(hierarchy, selector)
        self._listeners = Listeners(gates, selector, clock, self._admit)

    @property
    def busy(self) -> bool:
        """There is more to do at once."""
        return bool(self._unread) or bool(self._severed)

    def handle_unread(self) -> None:
        """Handles messages for which the last round had no time left."""
        for _ in range(len(self._unread)):
            connection = self._unread.popleft()
            if connection.unread is not None:
                self._handle(connection, connection.unread)
            if self._clock.now() >= self.until:
                break

    def keep_time(self, now: float) -> None:
        """Drops connections that have said no hello in time, and listens again after a pause."""
        while self._overdue and (self._overdue[0][0] <= now or self._is_settled(self._overdue[0][1])):
            _, connection = self._overdue.popleft()
            if not self._is_settled(connection):
                self._ready(connection, selectors.EVENT_READ)  # it may have spoken while we were held up
            if not self._is_settled(connection):
                self._drop(connection)
        self._listeners.keep_time(now)

    def next_moment(self) -> float | None:
        """When `keep_time` will have something to do."""
        moments = [self._overdue[0][0]] if self._overdue else []
        if self._listeners.deaf_until is not None:
            moments.append(self._listeners.deaf_until)
        return min(moments, default=None)

    # --- in ----------------------------------------------------------------------------------------------------------

    def _admit(self, connection: Connection) -> None:
        if not can_watch(self._selector, connection.sock, functools.partial(self._ready, connection)):
            connection.close()
            return
        self._connections.add(connection)
        self._overdue.append((self._clock.now() + HELLO_SECONDS, connection))
        if connection.tenant is None:
            self._refuse(
                connection,
                AccessDenied(
                    "SW-606",
                    what=f"this well serves user {self._uid}, not user {connection.uid}",
                    why="a well holds its users' data in plain memory, and this user is not among those of this socket",
                    fix="run engine and well as the same user, give this user a home of its own, make it a tenant of "
                    f"the well (tenants), or, if it may read what the well's own user spills, add {connection.uid} to "
                    "allow_uids",
                ),
            )
        elif not self._has_place(connection):
            self._refuse(connection, too_many("connections", MAX_CONNECTIONS))

    def _has_place(self, connection: Connection) -> bool:
        if len(self._connections) <= MAX_CONNECTIONS // 2:
            return True  # more than that is never set aside
        others = (c for c in self._connections if c is not connection and not c.ending)
        taken = Counter(str(other.tenant) for other in others)
        return self._hierarchy.shares.has_room(MAX_CONNECTIONS, taken, str(connection.tenant))

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
            self._bound(connection)

    def _handle(self, connection: Connection, messages: Iterator[FromEngine]) -> None:
        """Handles as many messages as fit into the round, at least one; the rest waits, and nothing more is read."""
        connection.unread = None
        try:
            for message in messages:
                self._take(connection, message)
                if connection.ending or connection.closed:
                    return
                if self._clock.now() >= self.until:
                    connection.unread = messages
                    self._unread.append(connection)
                    return
        except (AccessDenied, ProtocolError) as error:
            self._refuse(connection, error)
        finally:
            self.send_all()

    def _take(self, connection: Connection, message: FromEngine) -> None:
        if isinstance(message, Ping) and connection.greeted:
            self._send(connection, Pong(message.number))
        elif connection.member is not None:
            self._hierarchy.handle(connection.member, message)
        elif isinstance(message, Hello) and not connection.admin:
            self._greet(connection, message)
        elif connection.admin and self._asked(connection, message):
            pass
        else:
            raise ProtocolError(
                "SW-804",
                what=f"{type(message).__name__} is not expected here",
                why="a connection begins with one hello and keeps to its role",
                fix="use the same stepwell version for engine and well",
            )

    def _asked(self, connection: Connection, message: FromEngine) -> bool:
        """Answers a person's command. False: the message is not one of theirs."""
        self._commands.spoke(connection)
        answer = functools.partial(self._send, connection)
        if isinstance(message, StatsQuery):
            stats = self._stats(connection)
            answer(Stats(stats.well, stats.tiers) if message.by_tier else Stats(stats.flat()))
            return True
        if not connection.operator:
            raise AccessDenied(
                "SW-606",
                what=f"user {connection.uid} may not give this command at this socket",
                why="it concerns the whole well, so it is only for the well's main socket, and there for root and for"
                f" user {self._uid}, who runs the well",
                fix=f"run the command as user {self._uid}, for example with sudo, and with the well's main socket",
            )
        return admin.handle(self._hierarchy, self._shell, message, connection.uid, answer, self._stop)

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if not OLDEST_PROTOCOL <= hello.protocol <= PROTOCOL:
            raise ProtocolError(
                "SW-801",
                what=f"this side speaks protocol {hello.protocol}, the well {OLDEST_PROTOCOL} to {PROTOCOL}",
                why=f"the well, process {os.getpid()}, is of another version of stepwell: {self._hierarchy.well}",
                fix=f"use the same version for both; `kill {os.getpid()}` ends the well",
            )
        if hello.role == "admin":
            connection.admin = True
            discard_pidfd(connection)
            for idle in self._commands.add(connection):
                self._sever(idle)
            self._send(connection, Welcome(0, hello.protocol, self._hierarchy.well, self._hierarchy.limits.host_bytes))
            return
        watched = connection.pidfd >= 0 and is_pidfd(connection.pidfd)
        if watched and not self._exits.has_room(connection):
            self._refuse(connection, too_many("processes that were connected and still run", MAX_WATCHED))
            return
        if watched and not self._exits.watch(connection, functools.partial(self._exited, connection)):
            self._drop(connection)  # it will join again; an engine whose exit is not seen is leased nothing
            return
        assert connection.tenant is not None  # or it would be ending, and not listened to
        peer = Peer(connection.uid, connection.pid, watched, connection.tenant)
        send, sever = functools.partial(self._send, connection), functools.partial(self._sever, connection)
        member = self._hierarchy.join(peer, hello, ConnectionChannel(send, sever))
        if not watched:
            discard_pidfd(connection)
        if member is None:
            if watched:
                self._exits.unwatch(connection)
            self._end(connection)
            return
        connection.join(member)

    def _exited(self, connection: Connection, _: int) -> None:
        """Ends a member whose process has exited with all its threads, even if a forked child keeps its socket open."""
        if connection not in self._exits:
            return  # its socket's end was handled in this same round and left nothing to watch for
        self._exits.unwatch(connection)
        if connection.member is not None:
            self._hierarchy.exited(connection.member)
        self._drop(connection)

    # --- out ---------------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, message: Message, fds: tuple[int, ...] = ()) -> None:
        if connection.closed or connection in self._severed:
            return
        if connection.queue(message, fds):
            self._unsent.append(connection)
            self._bound(connection)
        else:
            self._too_much_waits(connection)

    def _bound(self, connection: Connection) -> None:
        """Ends the connection if more waits for it, or for all together, than the bounds allow."""
        if connection.closed or connection.waiting <= _WAITS_A_LOT:
            return
        taken: Counter[str] = Counter()
        for each in self._connections:
            taken[str(each.tenant)] += each.waiting
        if not self._hierarchy.shares.has_room(MAX_WAITING, taken, str(connection.tenant), 0):
            self._too_much_waits(connection)

    def _too_much_waits(self, connection: Connection) -> None:
        limited.log(
            logging.WARNING, "waiting", "no room for what waits for process %d: it is disconnected", connection.pid
        )
        self._sever(connection)

    def send_all(self) -> None:
        """Sends what was queued since the last call, as far as peers take it without waiting."""
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
        self._refused += 1
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

    def end_severed(self) -> None:
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
        self._commands.discard(connection)
        self._listeners.descriptor_freed()
        if connection not in self._exits:
            discard_pidfd(connection)
        if connection.member is not None:
            self._hear_out(connection.member.session)
            self._hierarchy.left(connection.member)
            if connection in self._exits and not self._hierarchy.watches(connection.member):
                self._exits.unwatch(connection)

    def _hear_out(self, session: Session) -> None:
        """Takes what the other members of a session that is about to end have said already, a few messages of each. An
        engine that closes in good order acknowledges its last copies first, by another socket: unheard, their slots
        would be held for as long as its process runs."""
        if session.phase is not SessionPhase.LIVE:
            return
        for other in [each for each in self._connections if each.member in session.members]:
            if other.unread is None:
                try:
                    other.unread = other.receive()
                except OSError:
                    continue
            try:
                for message in itertools.islice(other.unread or (), _LAST_WORDS):
                    self._take(other, message)
            except (AccessDenied, ProtocolError):
                other.unread = None

    def _is_settled(self, connection: Connection) -> bool:
        return connection.closed or (connection.greeted and not connection.ending)

    def close(self) -> None:
        """Peers see the end of their sockets; nothing is awaited."""
        for connection in self._connections:
            connection.close()
            discard_pidfd(connection)
        self._exits.close()
        self._listeners.close()

    def _stats(self, connection: Connection) -> WellStats:
        """Sums over all tenants, for the operator or where there is one tenant only; else what concerns this tenant.
        How sums change would tell one tenant what the others do."""
        if self._tenants > 1 and not connection.operator:
            return WellStats({"pid": os.getpid(), **self._hierarchy.stats_of(str(connection.tenant))})
        stats = self._hierarchy.figures()
        ours = {"pid": os.getpid(), "connections": len(self._connections), "connections_refused": self._refused}
        return WellStats({**stats.well, **ours}, stats.tiers)
