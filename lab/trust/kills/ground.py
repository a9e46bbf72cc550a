"""A place for the lives of one well: home, runtime directory and disk tier, and what may lie there after a kill."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepwell.client.holder import HOLDER_NAME
from stepwell.client.start import rendezvous
from stepwell.demo.model import cache_folder
from stepwell.io.paths import MEMORY, filesystem
from stepwell.log import LOG_NAME
from stepwell.serve.home.calibration import COSTS_NAME
from stepwell.serve.home.disks import LIST_NAME
from stepwell.serve.process import KEYRING_NAME
from stepwell.tiers.disk.recovery import LOCK, README

_IN_HOME = re.compile(
    rf"{KEYRING_NAME}(\.[0-9a-f]{{16}}\.new)?|{LOG_NAME}(\.\d+)?|({LIST_NAME}|{COSTS_NAME})(\.new)?|{README}"
    rf"|{HOLDER_NAME}"
)
_ON_DISK = re.compile(rf"[0-9a-f]{{16}}\.seg|{LOCK}|{README}")


@dataclass(frozen=True, slots=True)
class Ground:
    """`folder` has a short path, as sockets need; the disk tier lies below it unless that is memory."""

    folder: Path
    home: Path
    disk: Path

    @property
    def log(self) -> Path:
        """What the wells' processes say."""
        return self.folder / "said"

    @property
    def socket(self) -> Path:
        return rendezvous(self.home).socket

    def strays(self) -> list[str]:
        """Files that no well may leave behind, however it ended."""
        found = [path for path in _files(self.home) if not _IN_HOME.fullmatch(path.name)]
        found += [path for path in _files(self.disk) if not _ON_DISK.fullmatch(path.name)]
        ours = {self.socket, rendezvous(self.home).lock}
        found += [path for path in _files(self.socket.parent) if path not in ours]
        return [str(path) for path in found]

    def segment_bytes(self) -> int:
        """Of all segments on disk, by their sizes."""
        return sum(size for path in _files(self.disk) if path.suffix == ".seg" and (size := _size(path)))

    def clear(self) -> None:
        """Everything of this home's goes."""
        for path in (self.home, self.disk):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.socket, rendezvous(self.home).lock):
            path.unlink(missing_ok=True)

    def said(self, most: int = 2000) -> str:
        """The end of what the processes said."""
        try:
            return self.log.read_bytes()[-most:].decode("utf-8", "replace")
        except FileNotFoundError:
            return ""


@contextmanager
def ground() -> Iterator[Ground]:
    """A new place, and an environment of this process that leads there and says nothing else about stepwell; both are
    gone at the end. Not for two threads at a time."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as name:
        folder, base = Path(name), Path(name)
        if filesystem(folder) in MEMORY:
            cache_folder().mkdir(parents=True, exist_ok=True)
            base = cache_folder()
        with tempfile.TemporaryDirectory(prefix="lives-", dir=base, ignore_cleanup_errors=True) as disks:
            for key in [key for key in os.environ if key.startswith("STEPWELL_") or key == "XDG_RUNTIME_DIR"]:
                del os.environ[key]
            os.environ["TMPDIR"] = name
            try:
                yield Ground(folder, folder / "home", Path(disks) / "disk")
            finally:
                os.environ.clear()
                os.environ.update(before)


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _size(path: Path) -> int:
    """0 where it is gone meanwhile, or no file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
