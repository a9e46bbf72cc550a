"""Real filesystems for tests: mount(2), and small ones of their own in a file. Root only, Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_NO_SUID, _NO_DEV, _REMOUNT = 2, 4, 32
_DETACH = 2
_BUSY_S = 2.0
_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: the same number
_WITHOUT_LOG = 2  # both flags: the journal is not flushed

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, point: Path, kind: str, options: str = "", flags: int = 0) -> None:
    """Raises OSError."""
    done = _libc.mount(
        source.encode(), os.fsencode(point), kind.encode(), ctypes.c_ulong(flags | _NO_SUID | _NO_DEV), options.encode()
    )
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}", str(point))


def unmount(point: Path, *, lazily: bool = True) -> None:
    """Unmounts a filesystem. `lazily`: the point is free at once, and the filesystem ends when its last file is closed;
    else waits a moment for that. Does nothing if nothing is mounted there; raises OSError."""
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
        self.path.mkdir()
        try:
            self.mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def mount(self, options: str = "") -> None:
        """Mounts the filesystem, each time on a new device: a mount namespace that still holds the last one, as
        sandboxes do for a moment, would else make us share the device that was shut down. Raises OSError."""
        self._device = _run("losetup", "--find", "--show", str(self._image))
        mount(self._device, self.path, self._kind, options)

    def cut_power(self) -> None:
        """The filesystem stops as it lies on the device: what only memory has is lost, the journal's part included. All
        that is asked of it fails until it was unmounted and mounted again. Raises OSError."""
        with self._opened() as fd:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))

    def sync(self) -> None:
        """Makes the present content survive a power cut."""
        with self._opened() as fd:
            _libc.syncfs(fd)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def turn_read_only(self) -> None:
        """Does what ext4 does after an error: files stay open and readable, and writes fail with EROFS, until it is
        unmounted and mounted again. Raises OSError."""
        mount(self._device, self.path, self._kind, "abort", _REMOUNT)

    def unmount(self) -> None:
        """Raises OSError EBUSY while a process has files open there."""
        unmount(self.path, lazily=False)
        self._detach()

    def _detach(self) -> None:
        if self._device:
            subprocess.run(["losetup", "--detach", self._device], check=False, capture_output=True)
        self._device = ""

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            unmount(self.path)
        self._detach()
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
