"""A link to a well over its Unix socket: one quiet thread for what arrives, direct non-blocking sends for what leaves.

Knows frames and descriptors, not sessions; whoever dials gives it a receiver. Built for an engine process: nothing
here waits on the caller's thread once the link is open, the thread sleeps in poll until something happens (a busy
thread beside a scheduler costs milliseconds), and a forked child loses its copy of the link without a trace.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from pathlib import Path

from stepwell.client.refusal import passes, refusal
from stepwell.errors import AccessDenied, BackendDown, ProtocolError, StepwellError
from stepwell.io.paths import trusted_owners
from stepwell.io.process import descriptors
from stepwell.protocol import wire
from stepwell.protocol.link import Dial, Receiver
from stepwell.protocol.messages import FromWell, Hello, Message, Refused, SlabShared

CONNECT_SECONDS = 1.0
HELLO_SECONDS = 1.0
"""A hello unanswered for this long ends the link."""

MAX_QUEUED_BYTES = 64 << 20
MAX_QUEUED_MESSAGES = 100_000

_RECEIVE = 64 << 10
_MAX_FDS = 8  # a call that returns descriptors ends with the message that carried them
_GATHER = 64
_CREDENTIALS = struct.Struct("3i")

_open_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def dial(path: Path) -> Dial:
    """A `Dial` to the well that listens at `path`.

    Blocks for at most a second. Raises BackendDown SW-505 (nobody listens) or SW-503 (does not accept), AccessDenied
    SW-606 (somebody else's socket, or ours is not for us), ProtocolError SW-805 (the system has no pidfd) and, where
    this process gets no more descriptors, BackendDown SW-510 or OSError.
    """

    def open_link(hello: Hello, receiver: Receiver) -> SocketLink:
        sock = connect(path)
        try:
            _introduce(sock, hello)
            return SocketLink(sock, receiver)
        except BaseException:
            sock.close()
            raise

    return open_link


def _introduce(sock: socket.socket, hello: Hello) -> None:
    pidfd = _own_pidfd()
    try:
        send_hello(sock, hello, pidfd)
    finally:
        os.close(pidfd)


def connect(path: Path, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """A socket connected to a well of our own user, or of whoever owns the directory of `path`, with a timeout of
    `seconds`. Raises as `dial` says."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        try:
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise BackendDown(
                "SW-505",
                what="no well is running here",
                why=f"nobody listens at {path}",
                fix="start one with `stepwell serve`, or let an engine start it",
            ) from error
        except (TimeoutError, BlockingIOError) as error:
            raise BackendDown(
                "SW-503",
                what="the well does not accept connections",
                why="its queue of them is full",
                fix="look whether the well's process is stopped; `stepwell stop` names it",
            ) from error
        except PermissionError as error:
            raise AccessDenied(
                "SW-606",
                what=f"{path} may not be opened",
                why="it belongs to another user, and its mode does not let us in",
                fix="run engine and well as the same user, or in the group that the well's socket belongs to",
            ) from error
        except OSError as error:
            raise BackendDown(
                "SW-503",
                what=f"{path} cannot be connected to",
                why=error.strerror or str(error),
                fix="look into the well's log, and restart it with `stepwell stop`",
            ) from error
        if (uid := peer(sock)[1]) not in trusted_owners(path):
            raise AccessDenied(
                "SW-606",
                what=f"the well at {path} belongs to user {uid}",
                why="it would see this engine's KV, and the socket's directory is not safely that user's own",
                fix="run engine and well as the same user, or let the well's user own a directory for its socket that "
                "nobody else can write to, nor any above it",
            )
    except BaseException:
        sock.close()
        raise
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process (0 if it is not visible from here) and user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def send_hello(sock: socket.socket, hello: Hello, pidfd: int | None = None) -> None:
    """Sends the first message. A well that has refused already is no error here: its reason waits to be read."""
    data = wire.frame(hello)
    try:
        sent = socket.send_fds(sock, [data], [] if pidfd is None else [pidfd])
        sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError):
        pass
    except OSError as error:
        raise BackendDown(
            "SW-503",
            what="the hello could not be sent",
            why=str(error),
            fix="look whether the well's process is stopped; `stepwell stop` names it",
        ) from error


class SocketLink:
    """A `Link` over a connected socket on which the hello has been sent. `reason` says why it ended."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        self.reason: StepwellError | None = None
        self._sock = sock
        self._receiver = receiver
        self._lock = threading.Lock()  # held for one non-blocking send at most
        self._out: deque[memoryview] = deque()
        self._queued = 0
        self._closing = False  # nothing is sent any more; the thread ends
        self._writable = True  # false once the well takes no more; its last words are still read
        self._fds: deque[int] = deque()
        sock.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            _open_links.add(self)
            threading.Thread(target=self._run, name="stepwell-link", daemon=True).start()  # last: it uses all the rest
        except BaseException as error:
            self._closing = True
            _open_links.discard(self)
            wake, self._wake = self._wake, -1
            os.close(wake)
            if isinstance(error, RuntimeError):  # no thread is to be had
                raise refusal(error) from error
            raise

    def post(self, message: Message) -> None:
        if self._closing:
            return
        data = memoryview(wire.frame(message))
        with self._lock:
            if self._closing or not self._writable:
                return
            if self._queued + len(data) > MAX_QUEUED_BYTES or len(self._out) >= MAX_QUEUED_MESSAGES:
                self._end(
                    BackendDown(
                        "SW-504",
                        what="the link to the well was given up",
                        why="the well has not read for long and the queue is full",
                        fix="nothing needed, it is connected to again; see the well's log if it repeats",
                    )
                )
                return
            waiting = bool(self._out)
            self._out.append(data)
            self._queued += len(data)
            # Sending here saves a change of threads, which beside a busy interpreter can take milliseconds.
            if not waiting and not self._send():
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        if not self._closing:
            with self._lock:
                self._end(None)

    def _end(self, reason: StepwellError | None) -> None:
        """Under the lock, without which the thread could close `_wake` and its number could be another file's."""
        if not self._closing:
            self.reason = reason
            self._closing = True
            os.eventfd_write(self._wake, 1)

    def _send(self) -> bool:
        """Under the lock: one send of what is queued. True: nothing is left to do for the thread."""
        try:
            sent = self._sock.sendmsg([self._out[n] for n in range(min(_GATHER, len(self._out)))])
        except BlockingIOError:
            return False
        except OSError:
            self._writable = False
            self._out.clear()
            self._queued = 0
            return True
        self._queued -= sent
        while sent:
            first = self._out.popleft()
            if sent < len(first):
                self._out.appendleft(first[sent:])
                break
            sent -= len(first)
        return not self._out

    # --- the link's own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except StepwellError as error:
            with self._lock:
                self._end(error)
            if isinstance(error, ProtocolError):  # it may come again with every link, and somebody must act on it
                self._receiver.received(Refused(error.code, error.what, error.why, error.fix), ())
        except OSError as error:
            with self._lock:
                self._end(_lost(error.strerror or str(error)))
        finally:
            try:
                self._tear_down()
            finally:
                self._receiver.lost()  # whatever happens: who waits for it would never join again

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._sock, select.POLLIN)
        reader = wire.Reader(wire.from_well)
        answer_by: float | None = time.monotonic() + HELLO_SECONDS
        while not self._closing:
            with self._lock:
                want = select.POLLIN | (select.POLLOUT if self._out and self._writable else 0)
            poll.modify(self._sock, want)
            patience = None if answer_by is None else 1000 * (answer_by - time.monotonic())
            ready = dict(poll.poll(None if patience is None else max(0, int(patience) + 1)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            state = ready.get(self._sock.fileno(), 0)
            if state & select.POLLOUT:
                with self._lock:
                    if self._out:
                        self._send()
            if state & ~select.POLLOUT:
                got = self._receive(reader)
                if got is None:
                    raise _lost("the well has closed it")
                if got:
                    answer_by = None
            if answer_by is not None and time.monotonic() >= answer_by:
                raise BackendDown(
                    "SW-503",
                    what="the well does not answer",
                    why=f"its hello was not answered for {HELLO_SECONDS:g} s",
                    fix="look whether the well's process is stopped; `stepwell stop` names it",
                )

    def _receive(self, reader: wire.Reader[FromWell]) -> int | None:
        """Hands on what has arrived; the number of messages, None at the end of the stream."""
        try:
            data, fds, some_lost = descriptors.receive(self._sock, _RECEIVE, _MAX_FDS)
        except BlockingIOError:
            return 0
        self._fds.extend(fds)
        if some_lost or len(self._fds) > _MAX_FDS:
            raise ProtocolError(
                "SW-805",
                what="descriptors of the well were lost",
                why="this process can open no more",
                fix="raise its limit of open files (ulimit -n)",
            )
        if not data:
            return None
        count = 0
        for message in reader.feed(data):
            count += 1
            self._receiver.received(message, self._descriptor_of(message))
            if self._closing:
                break
        return count

    def _descriptor_of(self, message: Message) -> tuple[int, ...]:
        if not isinstance(message, SlabShared):
            return ()
        if not self._fds:
            raise ProtocolError(
                "SW-805",
                what="a slab came without its descriptor",
                why="nothing can be mapped",
                fix="use the same stepwell version for engine and well",
            )
        return (self._fds.popleft(),)

    def _tear_down(self) -> None:
        with self._lock:
            self._closing = True
            self._out.clear()
            _open_links.discard(self)
            self._sock.close()
            wake, self._wake = self._wake, -1
            os.close(wake)
            for fd in self._fds:
                os.close(fd)
            self._fds.clear()

    def _abandon(self) -> None:
        """In a forked child: the connection is the parent's, and no copy of it here may keep it open."""
        self._closing = True
        self._sock.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _abandon_all() -> None:
    for link in list(_open_links):
        link._abandon()
    _open_links.clear()


os.register_at_fork(after_in_child=_abandon_all)


def _own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and passes(error):
            raise refusal(error) from error
        raise ProtocolError(
            "SW-805",
            what="this process cannot prove to the well when it has ended",
            why=f"the system gives no pidfd: {error}",
            fix="use Linux 5.3 or newer, with pidfd_open allowed by the container's seccomp profile",
        ) from error


def _lost(why: str) -> BackendDown:
    return BackendDown(
        "SW-504",
        what="the link to the well has ended",
        why=why,
        fix="nothing needed, it is connected to again; see the well's log if it repeats",
    )
