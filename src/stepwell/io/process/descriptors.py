"""Receiving descriptors over a Unix socket.

Python's own `socket.recv_fds` ignores its flags (at least up to 3.13), so that what it receives would be inherited by
every program that an engine starts.
"""

from __future__ import annotations

import array
import socket

_SIZE = array.array("i").itemsize


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int], bool]:
    """Receives up to `size` bytes and about `most` descriptors, close-on-exec, which the caller owns.

    The last part of the answer is True if descriptors were lost, for lack of room or because this process can open no
    more. One call never returns descriptors of two sends. Raises OSError as recvmsg does.
    """
    data, ancillary, flags, _ = sock.recvmsg(size, socket.CMSG_SPACE(most * _SIZE), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % _SIZE])
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)
