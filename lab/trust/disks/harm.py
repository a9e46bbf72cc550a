"""What disks do to a running well: the kinds of harm that the campaign `devices` draws from.

Each kind is drawn anew every time: how many requests it meets, from which on, how badly.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.trust.disks.stages import Stage
from stepwell.testing.fuse import Rule

SEGMENTS = "*.seg"
KIB, MIB = 1 << 10, 1 << 20

Draw = Callable[[random.Random], Sequence[Rule]]
Damage = Callable[[Path, random.Random], bool]
"""Raises FileNotFoundError where the well has deleted the file meanwhile. False: it is what it was."""


def _some(dice: random.Random) -> float:
    """A share of requests: sometimes all, sometimes few."""
    return dice.choice((1.0, 0.5, 0.1))


def _failing_reads(dice: random.Random) -> Sequence[Rule]:
    if dice.random() < 0.3:  # a bad spot
        first = dice.randrange(4 * MIB)
        return [Rule(op="read", name=SEGMENTS, first=first, last=first + dice.choice((1, MIB)), errno=errno.EIO)]
    return [Rule(op="read", name=SEGMENTS, skip=dice.randrange(3), chance=_some(dice), errno=errno.EIO)]


def _altered_reads(dice: random.Random) -> Sequence[Rule]:
    flip = Rule(op="read", name=SEGMENTS, chance=_some(dice), flip=True)
    return [dice.choice((flip, Rule(op="read", name=SEGMENTS, chance=_some(dice), short=dice.random())))]


def _refused_writes(number: int) -> Draw:
    def draw(dice: random.Random) -> Sequence[Rule]:
        chance, skip = _some(dice), dice.randrange(4)
        ops = dice.choice((("write",), ("create", "fallocate"), ("write", "create", "fallocate", "unlink", "fsync")))
        return [Rule(op=op, name=SEGMENTS, skip=skip, chance=chance, errno=number) for op in ops]

    return draw


def _altered_writes(dice: random.Random) -> Sequence[Rule]:
    chance, share = _some(dice), dice.random()
    kinds = (
        Rule(op="write", name=SEGMENTS, chance=chance, lose=True),
        Rule(op="write", name=SEGMENTS, chance=chance, torn=share),
        Rule(op="write", name=SEGMENTS, chance=chance, short=share),
        Rule(op="write", name=SEGMENTS, chance=chance, flip=True),
    )
    return [dice.choice(kinds)]


def _slow(dice: random.Random) -> Sequence[Rule]:
    return [Rule(op=dice.choice(("read", "write")), name=SEGMENTS, chance=_some(dice), delay=dice.choice((0.01, 0.2)))]


def _hanging(op: str) -> Draw:
    def draw(dice: random.Random) -> Sequence[Rule]:
        number = dice.choice((0, 0, errno.EIO))  # it comes back well, or with an error
        return [Rule(op=op, skip=dice.randrange(3), hang=True, deaf=dice.random() < 0.5, errno=number)]

    return draw


FAULTS: dict[str, Draw] = {
    "reads that fail": _failing_reads,
    "reads that come short or altered": _altered_reads,
    "writes refused with EIO": _refused_writes(errno.EIO),
    "writes refused with ENOSPC": _refused_writes(errno.ENOSPC),
    "writes refused with EROFS": _refused_writes(errno.EROFS),
    "writes torn, lost or altered": _altered_writes,
    "a slow disk": _slow,
    "reads that hang": _hanging("read"),
    "writes that hang": _hanging("write"),
}
"""On a filesystem with faults."""


def _cut(path: Path, dice: random.Random) -> bool:
    nbytes = path.stat().st_size
    left = dice.choice((0, dice.randrange(nbytes + 1)))
    os.truncate(path, left)
    return left < nbytes


def _overwrite(path: Path, dice: random.Random) -> bool:
    return _write(path, dice.randrange(16 * MIB), dice.randbytes(dice.choice((1, 4 * KIB, MIB))))


def _write(path: Path, at: int, data: bytes) -> bool:
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(len(data))
        file.seek(at)
        file.write(data)
    return before != data


def _remove(path: Path, dice: random.Random) -> bool:
    path.unlink()
    return True


def _swap(path: Path, dice: random.Random) -> bool:
    """With another one, if there is one: bytes that are right, in the wrong place."""
    others = sorted(other for other in path.parent.glob(SEGMENTS) if other != path)
    if not others:
        return False
    other = dice.choice(others)
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)
    return mine != its


def _shift(path: Path, dice: random.Random) -> bool:
    """A stretch of it appears once more elsewhere in it."""
    data = path.read_bytes()
    pages = len(data) // (4 * KIB)
    if pages < 2:
        return False
    source, target = (4 * KIB * dice.randrange(pages) for _ in range(2))
    length = 4 * KIB * dice.randrange(1, 64)
    return _write(path, target, data[source : source + min(length, len(data) - target)])


DAMAGE: dict[str, Damage] = {
    "segments cut short": _cut,
    "segments overwritten": _overwrite,
    "segments deleted": _remove,
    "segments exchanged": _swap,
    "segments with pages in other places": _shift,
}
"""Done to files under a running well, behind its back."""

REAL: dict[str, Callable[[Stage], None]] = {
    "a full filesystem (ext4)": Stage.fill,
    "a filesystem that turns read-only (ext4)": Stage.turn_read_only,
}
"""What a kernel's own filesystem does, on a small one."""
