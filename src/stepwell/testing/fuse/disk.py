"""A faulty disk: a directory of a real filesystem, shown through one whose faults are set while it is mounted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stepwell.testing.fuse.faults import FuseReport, Rule
from stepwell.testing.mounts import unmount

_END_S = 5.0


def why_not() -> str:
    """Why no faulty disk can be made on this machine; empty if one can."""
    if os.geteuid():
        return "not root"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    try:
        with tempfile.TemporaryDirectory() as folder, FaultyDisk(Path(folder)):
            return ""
    except OSError as error:
        return f"no FUSE: {error}"


class FaultyDisk:
    """Shows the directory `backing` at `path`, on a filesystem of its own behind a process of its own, within the
    `with` block. At its end nothing is left of it: requests that hang and processes with open files get errors. The
    page cache does not come between: every read and write is a request. Root only; one filesystem below; no unnamed
    files (O_TMPFILE); locks are the kernel's own. `seed` draws the bits that flip and the outcomes of `Rule.chance`."""

    def __init__(self, backing: Path, seed: int = 0) -> None:
        self._backing = backing
        self._seed = seed
        self.path = Path()
        self.pid = 0
        """Process id of the process behind it. If it is killed, every request to the disk fails with ENOTCONN."""

    def __enter__(self) -> FaultyDisk:
        """Raises OSError if it cannot be."""
        self.path = Path(tempfile.mkdtemp(prefix="stepwell-faulty-"))
        command = [sys.executable, "-m", "stepwell.testing.fuse.server", self._backing, self.path, self._seed]
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def set(self, *rules: Rule) -> None:
        """These rules and no others from now on. What hangs goes on, under the rule that it hung by."""
        self._tell(msgspec.json.encode(rules))

    def heal(self) -> None:
        """Removes all faults."""
        self.set()

    def report(self) -> FuseReport:
        """Effects of the present rules so far."""
        return self._tell(b"null")

    def _tell(self, line: bytes) -> FuseReport:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> FuseReport:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the faulty disk of {self._backing} has ended")
        return msgspec.json.decode(line, type=FuseReport)

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        with contextlib.suppress(OSError):
            unmount(self.path)
        with contextlib.suppress(OSError):
            self.path.rmdir()
