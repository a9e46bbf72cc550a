"""The process behind a faulty disk: `python -m stepwell.testing.fuse.server DIRECTORY MOUNTPOINT SEED`.

Answers the kernel on as many threads as there are waiting requests, so that a hanging one holds up no other. Takes
lists of rules as JSON lines on its standard input and answers each line with a report. Standard input ends with the
owner of the disk: hanging requests are then released, and the filesystem is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

import msgspec

from stepwell.testing.fuse import wire
from stepwell.testing.fuse.faults import FuseFaults, Rule
from stepwell.testing.fuse.passthrough import Answer, FuseRequest, PassThrough
from stepwell.testing.fuse.wire import Op
from stepwell.testing.mounts import mount, unmount

MAX_THREADS = 128
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.ENOENT)  # the kernel took the request back


class FuseServer:
    """Serves one connection to the kernel. Threads are daemons: the process ends without them."""

    def __init__(self, fd: int, files: PassThrough, faults: FuseFaults) -> None:
        self._fd = fd
        self._files = files
        self._faults = faults
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def start(self) -> None:
        with self._lock:
            self._threads += 1
            self._idle += 1
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        buffer = bytearray(wire.BUFFER)
        view = memoryview(buffer)
        while True:
            try:
                nbytes = os.readv(self._fd, [buffer])
            except OSError as error:
                if error.errno in _AGAIN:
                    continue
                return  # unmounted
            with self._lock:
                self._idle -= 1
                more = not self._idle and self._threads < MAX_THREADS
            if more:
                self.start()
            self._handle(view[:nbytes])
            with self._lock:
                self._idle += 1

    def _handle(self, message: memoryview) -> None:
        _, kind, number, node, *_ = wire.IN_HEAD.unpack_from(message)
        request = FuseRequest(number, node, message[wire.IN_HEAD.size :])
        handler = self._files.handlers.get(kind)
        if handler is not None:
            try:
                self._answer(number, handler(request))
            except OSError as error:
                self._answer(number, error=error.errno or errno.EIO)
        elif kind == Op.INIT:
            self._answer(number, _agree(request))
        elif kind == Op.FORGET:
            self._files.forget(node, *request.fields(wire.NUMBER))
        elif kind == Op.BATCH_FORGET:
            for forgotten in wire.FORGET.iter_unpack(request.body[wire.COUNT.size :]):
                self._files.forget(*forgotten)
        elif kind == Op.INTERRUPT:
            self._faults.interrupt(*request.fields(wire.NUMBER))
        else:
            self._answer(number, error=errno.ENOSYS)

    def _answer(self, number: int, data: Answer = b"", error: int = 0) -> None:
        head = wire.OUT_HEAD.pack(wire.OUT_HEAD.size + len(data), -error, number)
        try:
            os.writev(self._fd, [head, data])
        except OSError as failed:
            if failed.errno not in (errno.ENOENT, errno.ENODEV):  # the caller, or the mount, is gone
                raise


def _agree(request: FuseRequest) -> bytes:
    major, minor, ahead, offered = request.fields(wire.INIT_IN)
    if major != wire.MAJOR or minor < wire.MINOR:
        raise SystemExit(f"the kernel speaks FUSE {major}.{minor}, too old")
    flags = wire.WANTED & offered
    pages = wire.MAX_TRANSFER // 4096
    return wire.INIT_OUT.pack(
        wire.MAJOR, wire.MINOR, ahead, flags, MAX_THREADS, MAX_THREADS, wire.MAX_TRANSFER, 1, pages, 0, *[0] * 8
    )


def main() -> None:
    directory, point, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    os.umask(0)  # the caller's was applied already
    faults = FuseFaults(seed)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    files = PassThrough(directory, faults)
    mount(
        "faulty", point, "fuse", f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={wire.MAX_TRANSFER}"
    )
    try:
        FuseServer(fd, files, faults).start()
        _report(faults)
        for line in sys.stdin.buffer:
            rules = msgspec.json.decode(line, type=list[Rule] | None)
            if rules is not None:
                faults.set(rules)
            _report(faults)
    finally:
        faults.set(())
        unmount(point)
    os._exit(0)  # daemon threads wait for requests


def _report(faults: FuseFaults) -> None:
    os.write(1, msgspec.json.encode(faults.report()) + b"\n")


if __name__ == "__main__":
    main()
