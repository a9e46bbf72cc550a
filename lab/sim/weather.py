"""What goes wrong with files at the moment."""

from __future__ import annotations

import errno
from dataclasses import dataclass

EVERYTHING = ("names", "create", "open", "unlink", "read", "write", "zero", "sync", "sync names", "free")
CHANGES = ("create", "unlink", "write", "zero")
ERRORS = (  # not ENOENT: a filesystem that says so of a file that is there lies
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EMFILE,
    errno.EACCES,
    errno.EINTR,
    errno.ETIMEDOUT,
)


@dataclass(frozen=True, slots=True)
class Weather:
    """Probabilities, each of 0 to 1, at every operation that it can happen to.

    error: one of `operations` fails with the errno `code`. short: a read ends early, a write stops half-way and then
    fails. rot: a bit that was read is another one. lose: a write is confirmed and not done. misdirect: it is done, but
    elsewhere. hang: the operation does not go on before somebody releases it."""

    error: float = 0.0
    code: int = errno.EIO
    operations: tuple[str, ...] = EVERYTHING
    short: float = 0.0
    rot: float = 0.0
    lose: float = 0.0
    misdirect: float = 0.0
    hang: float = 0.0


FAIR = Weather()
