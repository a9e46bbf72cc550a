"""Errors of cold pages and saved contexts."""

from __future__ import annotations

import errno
from pathlib import Path

from stepwell.errors import AccessDenied, BackendDown, CapacityError, IntegrityError
from stepwell.units import format_size

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers for a lack of room on the filesystem, for this user."""


def full(tier: str, why: str) -> CapacityError:
    return CapacityError(
        "SW-209",
        what=f"no more pages of this context fit in the {tier} tier",
        why=why,
        fix="give `host` or `disk` more room, or shorten the context; nothing was stored, all that was stays readable",
    )


def limit(tier: str, nbytes: int) -> CapacityError:
    return full(tier, f"all of its {format_size(nbytes)} are in use")


def damaged(pages: int, why: str) -> IntegrityError:
    some = "a page of this context" if pages == 1 else f"{pages} pages of this context"
    return IntegrityError(
        "SW-305",
        what=f"{some} failed its check" if pages == 1 else f"{some} failed their check",
        why=why,
        fix="start the generation again; if it comes back, look at the disk's own log",
    )


def broken(error: OSError, doing: str) -> BackendDown:
    return BackendDown(
        "SW-508",
        what=f"the file of a long context cannot be {doing}",
        why=error.strerror or str(error),
        fix="look at the disk's own log, or name a directory on another disk",
    )


def unusable(directory: Path, error: OSError) -> AccessDenied:
    return AccessDenied(
        "SW-608",
        what=f"the directory {directory} cannot hold pages",
        why=error.strerror or str(error),
        fix="name a directory of your own on a local disk",
    )
