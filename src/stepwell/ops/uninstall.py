"""Removal of stepwell's files from this machine: by name, never more than a well or the demo makes.

Three parts: a home, the directories of the disk tier, the demo's cache; lock and socket of the home's well go last. In
each part, regular files are ours if they have one of our names and belong to the owner of the directory; all others are
listed and left. A directory is removed only when it is empty afterwards. No path is followed through a symbolic link. A
well that runs holds locks on home and directories, and locked ones are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepwell.client.control import pid_at
from stepwell.client.fingerprint import CACHE_NAME
from stepwell.client.holder import HOLDER_NAME
from stepwell.client.start import lock, rendezvous
from stepwell.errors import BackendDown
from stepwell.io.paths import Rendezvous
from stepwell.log import LOG_NAME
from stepwell.serve.home import calibration, pauses, quarantine
from stepwell.serve.home.disks import LIST_NAME, remembered
from stepwell.serve.process import KEYRING_NAME
from stepwell.tiers.disk import recovery
from stepwell.vault.keyfile import CONTEXT_KEY_NAME

Kind = Literal["home", "data", "demo"]

_CACHE, _LOG = re.escape(CACHE_NAME), re.escape(LOG_NAME)
_STATE = (LIST_NAME, quarantine.LIST_NAME, pauses.PAUSED_NAME, calibration.COSTS_NAME)
_NAMES: dict[Kind, re.Pattern[str]] = {
    "data": re.compile("|".join((recovery.NAME.pattern, *map(re.escape, recovery.OURS)))),
    # Half-made files of killed processes are included; a stepwell.yaml is not, since a person wrote it.
    "home": re.compile(
        rf"({KEYRING_NAME}|{re.escape(CONTEXT_KEY_NAME)})(\.[0-9a-f]{{16}}\.new)?|{_LOG}(\.1)?|{re.escape(HOLDER_NAME)}|{_CACHE}|\.{_CACHE}\.(new|\w{{8}})|README\.txt"
        rf"|({'|'.join(map(re.escape, _STATE))})(\.new)?"
    ),
    "demo": re.compile(r"models|\.?demo-\w{8}"),
}
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file of ours, or in the demo's cache a folder of ours. `nbytes`: on disk."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LeftFolder:
    """A directory that exists: what of it is ours, and the names of what is not."""

    kind: Kind
    path: Path
    ours: tuple[LeftFile, ...]
    others: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.ours)


@dataclass(frozen=True, slots=True)
class Removed:
    """Result for one part. `left`: reasons why files are still there, by name; empty when the directory is gone."""

    kind: Kind
    path: Path
    names: tuple[str, ...]
    nbytes: int
    left: tuple[tuple[str, str], ...]


def survey(home: Path, disks: Iterable[Path], demo: Path) -> list[LeftFolder]:
    """Existing parts, of `disks` and of the directories that `home` remembers. Nothing is changed. A directory that is
    missing, a link or unreadable is no part, and one with two names is one part."""
    wanted: list[tuple[Kind, Path]] = [("data", disk) for disk in (*disks, *remembered(home))]
    wanted += [("home", home), ("demo", demo)]
    parts: dict[tuple[Kind, int, int], LeftFolder] = {}
    for kind, path in wanted:
        with contextlib.suppress(OSError), _opened(path) as folder:
            status = os.fstat(folder)
            parts.setdefault((kind, status.st_dev, status.st_ino), _look(kind, path, folder))
    return list(parts.values())


def remove(home: Path, parts: Iterable[LeftFolder], *sockets: Path) -> list[Removed]:
    """Deletes our files in these parts, as they are now, then lock and socket of home's well, and those of one that
    listens at `sockets`. No well of `home` can start meanwhile. Raises BackendDown SW-501 if one runs. Files that the
    system does not let us delete are left and, in parts, named."""
    places = [rendezvous(home)]
    named = [Rendezvous.named(socket) for socket in sockets]
    places += [place for place in named if os.path.lexists(place.lock)]  # else its directory may be gone too
    with contextlib.ExitStack() as held:
        for place in places:
            if held.enter_context(lock(place.lock)) is None or pid_at(place.socket) is not None:
                raise BackendDown(
                    "SW-501",
                    what=f"a well is running for {home}, or at its socket",
                    why="files in use are not deleted",
                    fix="end it with `stepwell stop`, or its service, and try again",
                )
        removed = [_remove(part) for part in parts]
        for place in places:
            _remove_place(place)
    return removed


def _remove_place(place: Rendezvous) -> None:
    """Removes files that a well makes anew when it starts. The caller holds the lock, so no process uses either."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(place.socket.lstat().st_mode):
            place.socket.unlink()
    with contextlib.suppress(OSError):
        place.lock.unlink()


def _look(kind: Kind, path: Path, folder: int) -> LeftFolder:
    owner = os.fstat(folder).st_uid
    ours, others = [], []
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        right_kind = stat.S_ISDIR(status.st_mode) if kind == "demo" else stat.S_ISREG(status.st_mode)
        if (
            right_kind
            and status.st_uid == owner
            and _NAMES[kind].fullmatch(name)
            and not _strange(folder, name, status)
        ):
            nbytes = _tree_bytes(path / name) if kind == "demo" else status.st_blocks * 512
            ours.append(LeftFile(name, nbytes))
        else:
            others.append(name)
    return LeftFolder(kind, path, tuple(ours), tuple(others))


def _strange(folder: int, name: str, status: os.stat_result) -> bool:
    """True for a file with one of our common names that is not ours: our lock is empty, and our README names us."""
    if name == _LOCK:
        return status.st_size > 0
    if name != "README.txt":
        return False
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    with open(fd, "rb") as file:
        return b"stepwell" not in file.read(4096)


def _remove(part: LeftFolder) -> Removed:
    gone: list[LeftFile] = []
    left: list[tuple[str, str]] = []
    try:
        with _opened(part.path) as folder, _unused(part, folder):
            now = _look(part.kind, part.path, folder)
            left = [(name, "not ours") for name in now.others]
            for item in now.ours:
                try:
                    if part.kind == "demo":
                        _remove_tree(item.name, folder)
                    else:
                        os.unlink(item.name, dir_fd=folder)
                    gone.append(item)
                except OSError as error:
                    left.append((item.name, error.strerror or str(error)))
        if not left:
            os.rmdir(part.path)
    except OSError as error:
        left.append((".", error.strerror or str(error)))
    names, nbytes = tuple(item.name for item in gone), sum(item.nbytes for item in gone)
    return Removed(part.kind, part.path, names, nbytes, tuple(left))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The directory itself, not what a link in its place points to."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unused(part: LeftFolder, folder: int) -> Iterator[None]:
    """Keeps wells of other homes out of a disk directory. Raises OSError if one uses it."""
    if part.kind != "data" or _LOCK not in (item.name for item in part.ours):
        yield
        return
    with _locked(_LOCK, folder):
        yield


@contextlib.contextmanager
def _locked(name: str, folder: int) -> Iterator[None]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "in use: another process holds its lock") from None
        yield
    finally:
        os.close(fd)


def _remove_tree(name: str, folder: int) -> None:
    """A folder of the demo, unless a demo runs in it."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):
            held.enter_context(_locked(f"{name}/{_LOCK}", folder))
        shutil.rmtree(name, dir_fd=folder)


def _tree_bytes(path: Path) -> int:
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total
