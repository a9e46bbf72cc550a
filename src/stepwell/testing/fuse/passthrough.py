"""A directory as a filesystem: each request is carried out below it, or goes wrong according to a rule.

A node is a file or directory that the kernel knows, held by a descriptor that only names it (O_PATH): so it stays the
same after a rename or unlink. A file's handle is the number of our own descriptor of it, opened without O_DIRECT even
if the caller asked for that: requests reach us anyway. Alignment is not checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.testing.fuse import wire
from stepwell.testing.fuse.faults import FuseFaults
from stepwell.testing.fuse.wire import Op

_KEPT = os.O_ACCMODE | os.O_APPEND | os.O_TRUNC | os.O_EXCL | os.O_CREAT


@dataclass(slots=True)
class _Node:
    fd: int
    name: str
    key: tuple[int, int]
    lookups: int = 1


@dataclass(frozen=True, slots=True)
class FuseRequest:
    """`body`: what follows the head, valid until the request is answered."""

    number: int
    node: int
    body: memoryview

    def fields(self, form: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = form.unpack_from(self.body)
        return found

    def names(self, form: Any = None) -> list[str]:
        return wire.names(bytes(self.body[form.size if form else 0 :]))


_Listing = list[tuple[str, os.stat_result]]
Answer = bytes | memoryview
Handler = Callable[[FuseRequest], Answer]


class PassThrough:
    """Carries requests out, on any thread. Handlers raise OSError; its errno is the answer."""

    def __init__(self, directory: Path, faults: FuseFaults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        status = os.fstat(fd)
        self._nodes = {wire.ROOT: _Node(fd, "", (status.st_dev, status.st_ino))}
        self._known = {(status.st_dev, status.st_ino): wire.ROOT}
        self._next = wire.ROOT + 1
        self._listings: dict[int, _Listing] = {}
        self._next_listing = 0
        self.handlers: dict[int, Handler] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.SETATTR: self._setattr,
            Op.MKDIR: self._mkdir,
            Op.UNLINK: self._unlink,
            Op.RMDIR: self._rmdir,
            Op.RENAME: self._rename,
            Op.RENAME2: self._rename2,
            Op.LINK: self._link,
            Op.OPEN: self._open,
            Op.CREATE: self._create,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.RELEASE: self._release,
            Op.FSYNC: self._fsync,
            Op.FSYNCDIR: self._fsyncdir,
            Op.FALLOCATE: self._fallocate,
            Op.LSEEK: self._lseek,
            Op.STATFS: self._statfs,
            Op.OPENDIR: self._opendir,
            Op.READDIR: self._readdir,
            Op.RELEASEDIR: self._releasedir,
        }

    # nodes ------------------------------------------------------------------------------------------------------------

    def forget(self, node: int, times: int) -> None:
        """The kernel drops so many of its references to the node."""
        with self._lock:
            known = self._nodes.get(node)
            if known is None or node == wire.ROOT:
                return
            known.lookups -= times
            if known.lookups <= 0:
                del self._nodes[node], self._known[known.key]
                os.close(known.fd)

    def _node(self, request: FuseRequest) -> _Node:
        with self._lock:
            known = self._nodes.get(request.node)
        if known is None:
            raise OSError(errno.ESTALE, "not a node that we know")
        return known

    def _entry(self, parent: _Node, name: str) -> bytes:
        """The node of this name, and a reference to it more."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent.fd)
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            number = self._known.get(key)
            if number is not None:
                os.close(fd)
                known = self._nodes[number]
                known.name = name
                known.lookups += 1
            else:
                number, self._next = self._next, self._next + 1
                self._nodes[number] = _Node(fd, name, key)
                self._known[key] = number
        return wire.ENTRY.pack(number, 0, 0, 0, 0, 0) + wire.attributes(status)

    @staticmethod
    def _attributes(status: os.stat_result) -> bytes:
        return wire.ATTRIBUTES_HEAD.pack(0, 0, 0) + wire.attributes(status)

    @staticmethod
    def _itself(node: _Node) -> str:
        return f"/proc/self/fd/{node.fd}"

    # names ------------------------------------------------------------------------------------------------------------

    def _lookup(self, request: FuseRequest) -> Answer:
        (name,) = request.names()
        self._faults.strike(request.number, "lookup", name)
        return self._entry(self._node(request), name)

    def _getattr(self, request: FuseRequest) -> Answer:
        node = self._node(request)
        self._faults.strike(request.number, "getattr", node.name)
        return self._attributes(os.fstat(node.fd))

    def _setattr(self, request: FuseRequest) -> Answer:
        node = self._node(request)
        what, _, fh, size, *_, mode, _, uid, gid, _ = request.fields(wire.SETATTR)
        self._faults.strike(request.number, "setattr", node.name)
        if what & wire.SET_MODE:
            os.chmod(self._itself(node), stat.S_IMODE(mode))
        if what & (wire.SET_UID | wire.SET_GID):
            os.chown(self._itself(node), uid if what & wire.SET_UID else -1, gid if what & wire.SET_GID else -1)
        if what & wire.SET_SIZE:
            os.truncate(fh if what & wire.SET_FH else self._itself(node), size)
        return self._attributes(os.fstat(node.fd))

    def _mkdir(self, request: FuseRequest) -> Answer:
        parent, (mode, _), (name,) = self._node(request), request.fields(wire.MKDIR), request.names(wire.MKDIR)
        self._faults.strike(request.number, "mkdir", name)
        os.mkdir(name, stat.S_IMODE(mode), dir_fd=parent.fd)
        return self._entry(parent, name)

    def _unlink(self, request: FuseRequest) -> Answer:
        (name,) = request.names()
        self._faults.strike(request.number, "unlink", name)
        os.unlink(name, dir_fd=self._node(request).fd)
        return b""

    def _rmdir(self, request: FuseRequest) -> Answer:
        (name,) = request.names()
        self._faults.strike(request.number, "rmdir", name)
        os.rmdir(name, dir_fd=self._node(request).fd)
        return b""

    def _rename(self, request: FuseRequest) -> Answer:
        return self._move(request, request.fields(wire.RENAME)[0], *request.names(wire.RENAME))

    def _rename2(self, request: FuseRequest) -> Answer:
        to, flags, _ = request.fields(wire.RENAME2)
        if flags:
            raise OSError(errno.EINVAL, "plain renames only")
        return self._move(request, to, *request.names(wire.RENAME2))

    def _move(self, request: FuseRequest, to: int, old: str, new: str) -> bytes:
        self._faults.strike(request.number, "rename", old)
        target = self._node(FuseRequest(request.number, to, request.body))
        os.rename(old, new, src_dir_fd=self._node(request).fd, dst_dir_fd=target.fd)
        return b""

    def _link(self, request: FuseRequest) -> Answer:
        (old,), (new,) = request.fields(wire.NUMBER), request.names(wire.NUMBER)
        parent, source = self._node(request), self._node(FuseRequest(request.number, old, request.body))
        self._faults.strike(request.number, "link", new)
        os.link(self._itself(source), new, dst_dir_fd=parent.fd, follow_symlinks=True)
        return self._entry(parent, new)

    # files ------------------------------------------------------------------------------------------------------------

    def _open(self, request: FuseRequest) -> Answer:
        node, (flags, _) = self._node(request), request.fields(wire.OPEN_IN)
        self._faults.strike(request.number, "open", node.name)
        fd = os.open(self._itself(node), flags & _KEPT & ~(os.O_CREAT | os.O_EXCL) | os.O_CLOEXEC)
        return wire.OPEN_OUT.pack(fd, wire.DIRECT_IO, 0)

    def _create(self, request: FuseRequest) -> Answer:
        parent, (flags, mode, *_), (name,) = (
            self._node(request),
            request.fields(wire.CREATE),
            request.names(wire.CREATE),
        )
        self._faults.strike(request.number, "create", name)
        kept = flags & _KEPT | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, kept, stat.S_IMODE(mode), dir_fd=parent.fd)
        return self._entry(parent, name) + wire.OPEN_OUT.pack(fd, wire.DIRECT_IO, 0)

    def _read(self, request: FuseRequest) -> Answer:
        fh, offset, nbytes, *_ = request.fields(wire.READ)
        rule = self._faults.strike(request.number, "read", self._node(request).name, offset, nbytes)
        data = memoryview(bytearray(nbytes))
        data = data[: os.preadv(fh, [data], offset)]
        if rule.flip:
            self._faults.flip(data)
        return data[: int(len(data) * rule.short)]

    def _write(self, request: FuseRequest) -> Answer:
        fh, offset, nbytes, *_ = request.fields(wire.READ)
        rule = self._faults.strike(request.number, "write", self._node(request).name, offset, nbytes)
        data = request.body[wire.READ.size :][:nbytes]
        if rule.flip:
            self._faults.flip(data)
        told = int(nbytes * rule.short)
        left = data[: 0 if rule.lose else min(told, int(nbytes * rule.torn))]
        while left:
            done = os.pwrite(fh, left, offset)
            left, offset = left[done:], offset + done
        return wire.WRITTEN.pack(told, 0)

    def _release(self, request: FuseRequest) -> Answer:
        os.close(request.fields(wire.NUMBER)[0])
        return b""

    def _fsync(self, request: FuseRequest) -> Answer:
        self._faults.strike(request.number, "fsync", self._node(request).name)
        os.fsync(request.fields(wire.FSYNC)[0])
        return b""

    def _fsyncdir(self, request: FuseRequest) -> Answer:
        self._faults.strike(request.number, "fsyncdir", self._node(request).name)
        return b""

    def _fallocate(self, request: FuseRequest) -> Answer:
        fh, offset, nbytes, mode, _ = request.fields(wire.FALLOCATE)
        self._faults.strike(request.number, "fallocate", self._node(request).name, offset, nbytes)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fh, mode, ctypes.c_long(offset), ctypes.c_long(nbytes)):
            raise OSError(ctypes.get_errno(), "fallocate")
        return b""

    def _lseek(self, request: FuseRequest) -> Answer:
        fh, offset, whence, _ = request.fields(wire.LSEEK)
        return wire.NUMBER.pack(os.lseek(fh, offset, whence))

    def _statfs(self, request: FuseRequest) -> Answer:
        node = self._node(request)
        self._faults.strike(request.number, "statfs", node.name)
        status = os.statvfs(self._itself(node))
        return wire.STATFS.pack(
            status.f_blocks,
            status.f_bfree,
            status.f_bavail,
            status.f_files,
            status.f_ffree,
            status.f_bsize,
            status.f_namemax,
            status.f_frsize,
            *[0] * 7,
        )

    # directories ------------------------------------------------------------------------------------------------------

    def _opendir(self, request: FuseRequest) -> Answer:
        with self._lock:
            handle, self._next_listing = self._next_listing, self._next_listing + 1
            self._listings[handle] = []
        return wire.OPEN_OUT.pack(handle, 0, 0)

    def _readdir(self, request: FuseRequest) -> Answer:
        """A reader that begins anew gets a new listing."""
        node, (handle, first, nbytes, *_) = self._node(request), request.fields(wire.READ)
        self._faults.strike(request.number, "readdir", node.name, first)
        if not first:
            self._listings[handle] = self._list(node)
        raw = b""
        for number, (name, status) in enumerate(self._listings[handle][first:], first + 1):
            encoded = os.fsencode(name)
            kind = stat.S_IFMT(status.st_mode) >> 12
            entry = wire.DIRENT.pack(status.st_ino, number, len(encoded), kind) + encoded
            entry += bytes(-len(entry) % 8)
            if len(raw) + len(entry) > nbytes:
                break
            raw += entry
        return raw

    def _list(self, node: _Node) -> _Listing:
        status = os.fstat(node.fd)
        listing = [(".", status), ("..", status)]
        with os.scandir(self._itself(node)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                    listing.append((entry.name, entry.stat(follow_symlinks=False)))
        return listing

    def _releasedir(self, request: FuseRequest) -> Answer:
        with self._lock:
            self._listings.pop(request.fields(wire.NUMBER)[0], None)
        return b""
