"""Real filesystems for tests: mount(2), and small ones of their own in a file. Root only, Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

READ_ONLY, NO_SUID, NO_DEV, REMOUNT = 1, 2, 4, 32
_DETACH = 2
_BUSY_S = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, point: Path, kind: str, options: str = "", flags: int = 0) -> None:
    """Raises OSError."""
    done = _libc.mount(
        source.encode(), os.fsencode(point), kind.encode(), ctypes.c_ulong(flags | NO_SUID | NO_DEV), options.encode()
    )
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}", str(point))


def unmount(point: Path, *, lazily: bool = True) -> None:
    """`lazily`: the point is free at once, and the filesystem goes when its last file is closed. Else waits a moment
    for that. Quiet if nothing is mounted there; raises OSError."""
    deadline = time.monotonic() + _BUSY_S
    while _libc.umount2(os.fsencode(point), ctypes.c_int(_DETACH if lazily else 0)):
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            return
        if number != errno.EBUSY or time.monotonic() > deadline:
            raise OSError(number, f"unmount: {os.strerror(number)}", str(point))
        time.sleep(0.02)


def why_no_mounts(kind: str = "ext4") -> str:
    """Why `Image` cannot make filesystems of this kind here; empty if it can."""
    if os.geteuid():
        return "not root"
    for tool in (f"mkfs.{kind}", "losetup"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Image(Path(folder), kind, 320 if kind == "xfs" else 16):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no {kind} in a file: {error}"


class Image:
    """A filesystem of `mib` MiB in a file below `folder`, mounted at `path` as long as this is entered. `unmount` and
    `mount` in between, as after a crash. At the end nothing of it is left but what still has files open there."""

    def __init__(self, folder: Path, kind: str, mib: int) -> None:
        self.path = folder / "mnt"
        self._image = folder / "image"
        self._kind = kind
        self._mib = mib
        self._device = ""

    def __enter__(self) -> Image:
        self._image.touch()
        os.truncate(self._image, self._mib << 20)
        quiet = {"ext4": ["-q", "-F", "-m", "0"], "xfs": ["-q", "-f"]}[self._kind]
        _run(f"mkfs.{self._kind}", *quiet, str(self._image))
        self._device = _run("losetup", "--find", "--show", str(self._image))
        self.path.mkdir()
        try:
            self.mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def mount(self, flags: int = 0) -> None:
        """Raises OSError."""
        mount(self._device, self.path, self._kind, flags=flags)

    def remount(self, *, read_only: bool) -> None:
        """Raises OSError EBUSY where files are open for writing and it is to be read-only."""
        self.mount(REMOUNT | (READ_ONLY if read_only else 0))

    def unmount(self) -> None:
        """Raises OSError EBUSY while somebody has files open there."""
        unmount(self.path, lazily=False)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            unmount(self.path)
        if self._device:
            subprocess.run(["losetup", "--detach", self._device], check=False, capture_output=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()
            self._image.unlink()


@contextlib.contextmanager
def image(kind: str, mib: int) -> Iterator[Image]:
    """An `Image` in a folder of its own under the system's temporary one."""
    temporary = tempfile.TemporaryDirectory(prefix="stepwell-disk-", ignore_cleanup_errors=True)
    with temporary as folder, Image(Path(folder), kind, mib) as made:
        yield made


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
