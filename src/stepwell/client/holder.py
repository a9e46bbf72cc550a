"""The well that holds a home, found whatever the environment: socket and lock of a well lie in a runtime directory, and
two environments may have two of these (XDG_RUNTIME_DIR is set in a login session, not in a service or a container).

So the well also locks a file in home for as long as it lives, and writes there where it is met. The lock alone says
that it lives: it ends with the process, however that ends, and holds in every container that shares home. What is
written there without a lock is of a well that is gone.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepwell.client.refusal import passes, refusal
from stepwell.errors import BackendDown
from stepwell.io.paths import Rendezvous

HOLDER_NAME = "well.lock"
_MOST_BYTES = 4096


class _Record(msgspec.Struct, frozen=True):
    pid: int
    socket: str
    lock: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A well that lives. `place`: where it is met, None if it has not said so yet; `pid` as it sees itself."""

    place: Rendezvous | None
    pid: int


def holder(home: Path) -> Holder | None:
    """The well that holds `home`; None if none does. Raises BackendDown SW-510 if this process can open no more."""
    try:
        fd = os.open(home / HOLDER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if passes(error):
            raise refusal(error) from error
        return None
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not _locked(fd):
            return None
        try:
            record = msgspec.json.decode(os.read(fd, _MOST_BYTES), type=_Record)
        except msgspec.DecodeError:
            return Holder(None, 0)
        return Holder(Rendezvous(Path(record.socket), Path(record.lock)), record.pid)
    finally:
        os.close(fd)


def record(place: Rendezvous) -> bytes:
    """What the well that is met at `place` writes into its lock."""
    return msgspec.json.encode(_Record(os.getpid(), str(place.socket), str(place.lock)))


def held_by(home: Path, well: Holder | None) -> BackendDown:
    """A well of this home lives where it cannot be met from here."""
    at = f" at {well.place.socket}" if well is not None and well.place is not None else ""
    return BackendDown(
        "SW-501",
        what=f"a well is already running for {home}, and cannot be reached from here",
        why=f"process {well.pid if well is not None else 0}, as its own system or container counts, listens{at}: in "
        "another runtime directory, or in another container",
        fix="give all that use this home the same XDG_RUNTIME_DIR (a directory that all of them see), or the well a "
        "socket of its own with `socket`; or end it where it runs (`stepwell stop`), or set STEPWELL_HOME to another",
    )


def is_locked(path: Path) -> bool:
    """Somebody holds the lock at `path`. Makes no file there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _locked(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no locks on this filesystem, so no well holds one
    return False
