"""Checks of one directory of the disk tier: whose it is, what it lies on, how much fits, how fast it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stepwell.config import DiskPlace, Settings
from stepwell.io.mounts import SYSTEM
from stepwell.io.paths import MEMORY, NETWORK, OVERLAY, filesystem
from stepwell.ops.checks import speed
from stepwell.ops.checks.check import Check, Facts, Status
from stepwell.tiers.disk.site import usable_bytes
from stepwell.tiers.disk.tier import MIN_SEGMENT, MIN_SEGMENTS
from stepwell.units import format_size

_MIN_BYTES = MIN_SEGMENTS * MIN_SEGMENT
_SLOW_GB_S = 0.2


def directory(place: DiskPlace) -> Iterator[Check]:
    """Checks that the directory is this user's and that others cannot write in it, or that it can be made in the
    nearest existing parent."""
    path = place.path
    if not os.path.lexists(path):
        parent = next(parent for parent in path.parents if os.path.lexists(parent))
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            yield _check("disk-directory", "ok", "it is not there yet; the well makes it, and what is above it", place)
        else:
            text = f"it is not there, and you may not make it in {parent}"
            yield _check("disk-directory", "fail", text, place, f"mkdir -p -m 0700 '{path}', as the well's user")
        return
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        text = "it is not a directory, or a symbolic link to one"
        yield _check("disk-directory", "fail", text, place, "name the directory itself in `disk`")
    elif status.st_uid != os.geteuid():
        text = f"it belongs to the user with id {status.st_uid}, not to {os.geteuid()}"
        yield _check("disk-directory", "fail", text, place, f"chown {os.geteuid()} '{path}', or name another directory")
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"its mode is {mode:04o}, so others could put files there"
        yield _check("disk-directory", "fail", text, place, f"chmod 0700 '{path}'")
    else:
        yield _check("disk-directory", "ok", f"it is ours, mode {mode:04o}", place)


def kind(place: DiskPlace, system: Path = SYSTEM) -> Iterator[Check]:
    """Checks that it lies on a local filesystem that outlives the container, can be written and has room for files."""
    found = _existing(place.path)
    of = os.statvfs(found)
    name = filesystem(found, system)
    facts = {"filesystem": name}
    on = f"it is on {name or 'a filesystem of unknown kind'}"
    if name in MEMORY:
        text, fix = f"{on}, which is memory, not a disk", "name a directory on a local disk; for memory set `host`"
        yield _check("disk-filesystem", "fail", text, place, fix, facts)
    elif name in NETWORK:
        text = f"{on}, a network filesystem: locks and O_DIRECT are not reliable there, and it may hang"
        yield _check("disk-filesystem", "fail", text, place, "name a directory on a local disk", facts)
    elif not of.f_blocks:
        text = f"{on}, which has no room for files, or does not say how much"
        yield _check("disk-filesystem", "fail", text, place, "name a directory on a local disk", facts)
    elif of.f_flag & os.ST_RDONLY:
        fix = "mount it for writing (`:rw` of a volume, ReadWritePaths= of a unit), or name another directory"
        yield _check("disk-filesystem", "fail", f"{on}, mounted read-only", place, fix, facts)
    elif name in OVERLAY:
        text = f"{on}: it vanishes with the container, and nothing is warm after that"
        yield _check("disk-filesystem", "warn", text, place, "mount a volume of the host there", facts)
    else:
        yield _check("disk-filesystem", "ok", on, place, facts=facts)


def space(settings: Settings, place: DiskPlace) -> Iterator[Check]:
    """Checks that the size asked for, by all directories of this filesystem together, fits beside the reserve. Silent
    about a filesystem without blocks, which `kind` reports."""
    found = _existing(place.path)
    of = os.statvfs(found)
    total, free = of.f_blocks * of.f_frsize, of.f_bavail * of.f_frsize
    if not total:
        return
    together = [other for other in settings.disk if _device(other.path) == _device(place.path)]
    alone, wanted = place.size.of(total), sum(other.size.of(total) for other in together)
    reserve = settings.disk_reserve.of(total)
    usable = usable_bytes([other.path for other in together], free, reserve)
    facts = {"total_bytes": total, "free_bytes": free, "reserve_bytes": reserve, "wanted_bytes": wanted,
             "usable_bytes": usable}  # fmt: skip
    shared = f" (by {len(together)} directories together)" if len(together) > 1 else ""
    text = (
        f"{format_size(wanted)} wanted{shared}; {format_size(usable)} can be used: {format_size(free)} of "
        f"{format_size(total)} are free, {format_size(reserve)} are left to others"
    )
    if alone < _MIN_BYTES:
        fix = f"give it at least {format_size(_MIN_BYTES)}"
        yield _check("disk-space", "fail", f"{format_size(alone)} hold no segments", place, fix, facts)
    elif reserve + _MIN_BYTES > total:
        yield _check("disk-space", "fail", text, place, "lower disk_reserve, or name another directory", facts)
    elif alone + reserve > total:  # the well refuses this; less depends on the free space
        fix = f"lower the size to at most {(total - reserve) >> 20}MiB, or disk_reserve"
        yield _check("disk-space", "fail", text, place, fix, facts)
    elif usable < _MIN_BYTES:
        fix = "free space, lower disk_reserve, or name another directory"
        yield _check("disk-space", "fail", text, place, fix, facts)
    elif wanted > usable:
        fix = f"lower the size to at most {format_size(usable)}, or free space; the tier stops growing at the reserve"
        yield _check("disk-space", "warn", text, place, fix, facts)
    else:
        yield _check("disk-space", "ok", text, place, facts=facts)


def measured(place: DiskPlace) -> Iterator[Check]:
    """Measures O_DIRECT and speed with one unnamed temporary file of at most 64 MiB."""
    found = _existing(place.path)
    of = os.statvfs(found)
    if of.f_blocks and of.f_bavail * of.f_frsize < 2 * speed.FILE_BYTES:  # without blocks it does not count them
        yield _check("disk-speed", "warn", "not measured: the disk is full", place, "free space")
        return
    try:
        result = speed.measure(found)
    except speed.Hung as error:
        fix = "look into the kernel's log (dmesg) and the state of the device; the well goes on without it"
        yield _check("disk-speed", "fail", str(error), place, fix)
        return
    except OSError as error:
        text = f"a file in it cannot be made, written or read: {error.strerror or error}"
        yield _check("disk-speed", "fail", text, place, "correct its permissions or its device")
        return
    facts: Facts = {
        "direct": int(result.direct),
        "write_gb_s": round(result.write_gb_s, 3),
        "read_gb_s": round(result.read_gb_s, 3),
    }
    text = f"writes {result.write_gb_s:.2f} GB/s, reads {result.read_gb_s:.2f} GB/s"
    if not result.direct:
        fix = "a directory on ext4 or XFS has O_DIRECT; without it all goes through the page cache, at more CPU"
        yield _check("disk-speed", "warn", f"{text}, without O_DIRECT", place, fix, facts)
    elif min(result.write_gb_s, result.read_gb_s) < _SLOW_GB_S:
        fix = "use a local NVMe disk; from this one little is recalled faster than it is computed again"
        yield _check("disk-speed", "warn", f"{text} with O_DIRECT: that is slow", place, fix, facts)
    else:
        yield _check("disk-speed", "ok", f"{text} with O_DIRECT", place, facts=facts)


def key_apart(settings: Settings, place: DiskPlace, home: Path) -> Iterator[Check]:
    """The keyring does not lie on the device whose contents it seals."""
    if settings.seal == "plain":
        text = "seal is plain: the disk shows all cached blocks to its readers"
        yield _check("disk-key", "warn", text, place, "set seal to aes-256-gcm unless the disk itself is encrypted")
    elif _device(home) == _device(place.path):
        text = f"the keyring in {home} is on the same device as the data: a thief of one has both"
        yield _check("disk-key", "warn", text, place, "set STEPWELL_HOME to a directory on another device")
    else:
        yield _check("disk-key", "ok", "the keyring is on another device than the data", place)


def all_of(settings: Settings, place: DiskPlace, home: Path, system: Path = SYSTEM) -> Iterator[Check]:
    """All checks of one directory. It is not measured if writing there is impossible or unsafe."""
    basic = [*directory(place), *kind(place, system)]
    yield from basic
    if not any(check.name == "disk-directory" and check.status == "fail" for check in basic):
        yield from space(settings, place)
        if not any(check.status == "fail" for check in basic):
            yield from measured(place)
        yield from key_apart(settings, place, home)


def _check(name: str, status: Status, text: str, place: DiskPlace, fix: str = "", facts: Facts | None = None) -> Check:
    return Check(name, status, text, fix, str(place.path), facts or {})


def _existing(path: Path) -> Path:
    """`path`, or its nearest existing parent."""
    return next(candidate for candidate in (path, *path.parents) if os.path.exists(candidate))


def _device(path: Path) -> int:
    return _existing(path).stat().st_dev
