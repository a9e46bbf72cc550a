"""A disk that fails when told to: a directory of a real filesystem, seen through one whose faults are set live."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stepwell.testing.fuse.faults import Report, Rule
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
    """Shows the directory `backing` at `path`, on a filesystem of its own behind a process of its own, as long as this
    is entered. In the end nothing of it is left, whatever hangs and whoever has files open there: they get errors.

    The page cache does not come between: every read and write is a request. Root, one filesystem below, and no unnamed
    files (O_TMPFILE), locks are the kernel's own. `seed` draws which bits flip and what `Rule.chance` decides.
    """

    def __init__(self, backing: Path, seed: int = 0) -> None:
        self._backing = backing
        self._seed = seed
        self.path = Path()
        self.pid = 0
        """Of the process behind it. Killed, all that is asked of the disk fails with ENOTCONN."""

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
        """No faults from now on."""
        self.set()

    def report(self) -> Report:
        """What the present rules have done."""
        return self._tell(b"null")

    def _tell(self, line: bytes) -> Report:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Report:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the faulty disk of {self._backing} has ended")
        return msgspec.json.decode(line, type=Report)

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
