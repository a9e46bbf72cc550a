"""One connection of the well: bytes in become messages, messages out become bytes, both within bounds.

It has no policy: `serve.server.server`, its only caller, decides what a message means. Nothing here blocks.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from stepwell.block.facts import MAX_FACTS
from stepwell.hierarchy.sessions.session import Member
from stepwell.io.process import descriptors
from stepwell.protocol import wire
from stepwell.protocol.messages import MAX_ACKNOWLEDGED, MAX_ASKED, FromEngine, Message, pieces
from stepwell.serve.server.gates import Gate

MAX_OUTPUT = 64 << 20
"""Bytes that may wait for a peer that does not read; one more ends the connection."""

MAX_HELLO = MAX_FACTS + (64 << 10)
"""Bytes that a peer may send before its hello is complete, and bytes of any message of a person's command."""

_RECEIVE = 64 << 10
_GATHER = 64  # buffers handed to one sendmsg; the system allows 1024
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """`member` is set for an engine, `admin` for a person's command; neither while the hello is awaited. `tenant`: the
    tenant that it belongs to, None if it is to be refused. `operator`: it may change the well and see all of it.

    `ending`: closed as soon as the output is sent, and not read any more. The server closes `pidfd`.
    """

    __slots__ = (
        "_out",
        "_pieces",
        "_reader",
        "_silent",
        "admin",
        "closed",
        "ending",
        "member",
        "operator",
        "pid",
        "pidfd",
        "sock",
        "tenant",
        "uid",
        "unread",
        "wants_write",
    )

    def __init__(self, sock: socket.socket, gate: Gate) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid, self.uid, _ = peer(sock)
        self.tenant = gate.tenants.get(self.uid)
        self.operator = self.uid in gate.operators
        self.member: Member | None = None
        self.admin = False
        self.ending = False
        self.closed = False
        self.pidfd = -1
        self.wants_write = False
        self.unread: Iterator[FromEngine] | None = None  # messages received and not yet handled
        self._reader = wire.Reader(wire.from_engine, MAX_HELLO)
        self._pieces: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._out = 0

    @property
    def greeted(self) -> bool:
        return self.admin or self.member is not None

    def join(self, member: Member) -> None:
        """Makes it a connection of this member; longer messages are taken from now on."""
        self.member = member
        self._reader.most = MAX_ASKED if member.is_scheduler else MAX_ACKNOWLEDGED

    @property
    def waiting(self) -> int:
        """Bytes that wait for the peer: to be read by it, or for the rest of its message."""
        return self._out + self._reader.waiting

    def receive(self) -> Iterator[FromEngine] | None:
        """The messages that the next bytes complete, long ones in pieces; None at the end of the stream.

        The iterator must be used up before the next call; it raises ProtocolError. Raises OSError (BlockingIOError
        when there is nothing to read).
        """
        if self.greeted:
            data = self.sock.recv(_RECEIVE)  # the kernel closes descriptors that are not received
        else:
            data, fds, _ = descriptors.receive(self.sock, MAX_HELLO, 1)
            for fd in fds:
                if self.pidfd < 0:
                    self.pidfd = fd
                else:
                    os.close(fd)
        return chain.from_iterable(map(pieces, self._reader.feed(data))) if data else None

    def queue(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """Keeps the message for `flush`, with duplicates of `fds`. False: over a bound, nothing was kept."""
        data = wire.frame(message)
        if self._out + len(data) > MAX_OUTPUT:
            return False
        copies: tuple[int, ...] = ()
        try:
            for fd in fds:
                copies += (os.dup(fd),)
        except OSError:  # this process may open no more
            _close(copies)
            return False
        self._out += len(data)
        self._pieces.append((memoryview(data), copies))
        return True

    def flush(self) -> bool:
        """Sends what the peer takes without waiting. True: all is sent. Raises OSError when the peer is gone."""
        while self._pieces:
            view, fds = self._pieces[0]
            try:
                # Descriptors ride with the first byte of their own message, so such a message starts a call of its own.
                sent = socket.send_fds(self.sock, [view], fds) if fds else self.sock.sendmsg(self._gather())
            except BlockingIOError:
                return False
            _close(fds)
            if fds:
                self._pieces[0] = (view, ())
            self._sent(sent)
        return True

    def _gather(self) -> list[memoryview]:
        views: list[memoryview] = []
        for view, fds in self._pieces:
            if fds or len(views) == _GATHER:
                break
            views.append(view)
        return views

    def _sent(self, count: int) -> None:
        self._out -= count
        while count:
            view, _ = self._pieces[0]
            if count < len(view):
                self._pieces[0] = (view[count:], ())
                return
            count -= len(view)
            self._pieces.popleft()

    def close(self) -> None:
        """Closes everything but `pidfd`."""
        self.closed = True
        self.unread = None
        self.sock.close()
        for _, fds in self._pieces:
            _close(fds)
        self._pieces.clear()


@dataclass(frozen=True, slots=True)
class ConnectionChannel:
    """A connection as the hierarchy sees it."""

    send: partial[None]
    sever: partial[None]


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """Process (0 if it is not visible from here), user and group at the other end, as the kernel knows them."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def is_pidfd(fd: int) -> bool:
    """Other descriptors could become readable for reasons of their own, which would look like an exit."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            return any(line.startswith(b"Pid:") for line in file)
    except OSError:
        return False


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
