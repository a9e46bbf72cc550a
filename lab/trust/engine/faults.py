"""Faults that befall a well while its engines are asked: to its process, to its files, to its disk.

A fault lasts for an episode of several rounds of requests: it begins before the first and ends after the last, and in
each round it may strike once more, at a random moment. Whether it was met is told by what counts it: the faulty disk's
own report, signals that found a process, files that were changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.trust.engine.rivals import Descriptors, Memory, Rivals
from lab.trust.engine.well import TestedWell
from lab.trust.kills import memory
from stepwell.testing.fuse import FaultyDisk, Rule

MOMENT_S = 1.5
"""The longest that the well is halted, or its disk hangs, within one round."""

SLOW_S = 0.06
_STRIDE, _HEAD = 64 << 10, 8192
_PAGE, _PIECES = 4096, 8

Act = Callable[[random.Random], int]
"""Does something and returns how often that took effect."""


def nothing(dice: random.Random) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Fault:
    """`lasting`: what it has done stays, so that it may be met later."""

    name: str
    begin: Act = nothing
    strike: Act = nothing
    end: Act = nothing
    lasting: bool = False


CALM = Fault("no fault")


def kinds(well: TestedWell) -> list[Fault]:
    """All that can be tried on this machine."""
    found = [
        CALM,
        Fault("well killed", strike=partial(_done, well, "killed", well.kill)),
        Fault("well stopped", strike=partial(_done, well, "stopped", well.stop)),
        Fault(
            "well halted",
            begin=partial(_done, well, "halted", well.halt),
            end=partial(_done, well, "", well.go_on),
        ),
        Fault("well halted for moments", strike=partial(_halted, well)),
        Fault("segments with flipped bytes", strike=partial(_to_segments, well.disk, _flip), lasting=True),
        Fault("segments cut short", strike=partial(_to_segments, well.disk, _cut), lasting=True),
        Fault("segments swapped", strike=partial(_swap, well.disk), lasting=True),
        Fault("segments deleted", strike=partial(_to_segments, well.disk, _delete), lasting=True),
        Fault("segments with pieces in wrong places", strike=partial(_misplace, well.disk), lasting=True),
        Fault("a second well", strike=Rivals(well).strike),
    ]
    if os.geteuid() == 0:
        files = Descriptors(well)
        found.append(Fault("well without descriptors", begin=files.begin, strike=files.strike, end=files.end))
    if not memory.why_not():
        found.append(Fault("well without memory", strike=Memory(well).strike))
    if (disk := well.faulty) is not None:
        found += _of_disks(disk)
    return found


def _of_disks(disk: FaultyDisk) -> list[Fault]:
    read_only = [Rule(op=op, errno=errno.EROFS) for op in ("write", "create", "unlink", "rename", "setattr")]
    full = [Rule(op=op, errno=errno.ENOSPC) for op in ("write", "create", "fallocate")]
    hang = Rule(name="*.seg", hang=True)
    rules = {
        "disk: EIO on reads": [Rule(op="read", errno=errno.EIO)],
        "disk: EIO on some reads": [Rule(op="read", errno=errno.EIO, chance=0.3)],
        "disk: EIO on writes": [Rule(op="write", errno=errno.EIO)],
        "disk: ENOSPC": full,
        "disk: read-only": read_only,
        "disk: slow": [Rule(op=op, delay=SLOW_S) for op in ("read", "write")],
        "disk: flips what is read": [Rule(op="read", name="*.seg", flip=True)],
        "disk: flips what is written": [Rule(op="write", name="*.seg", flip=True)],
        "disk: loses writes": [Rule(op="write", name="*.seg", lose=True, chance=0.5)],
        "disk: torn writes": [Rule(op="write", name="*.seg", torn=0.5, chance=0.5)],
        "disk: short reads": [Rule(op="read", name="*.seg", short=0.5, chance=0.5)],
        "disk: hangs": [hang],
    }
    lasting = ("written", "loses", "torn")
    faults = [
        Fault(
            name,
            begin=partial(_ruled, disk, chosen),
            end=partial(_healed, disk),
            lasting=any(word in name for word in lasting),
        )
        for name, chosen in rules.items()
    ]
    return [*faults, Fault("disk: hangs for moments", strike=partial(_hung, disk, hang))]


# the well's process --------------------------------------------------------------------------------------------------


def _done(well: TestedWell, what: str, act: Callable[[], None], dice: random.Random) -> int:
    before = well.struck[what]
    act()
    return well.struck[what] - before


def _halted(well: TestedWell, dice: random.Random) -> int:
    before = well.struck["halted"]
    well.halt()
    time.sleep(dice.uniform(0, MOMENT_S))
    well.go_on()
    return well.struck["halted"] - before


# its disk ------------------------------------------------------------------------------------------------------------


def _ruled(disk: FaultyDisk, rules: Sequence[Rule], dice: random.Random) -> int:
    disk.set(*rules)
    return 0


def _healed(disk: FaultyDisk, dice: random.Random) -> int:
    hits = sum(disk.report().hits)
    disk.heal()
    return hits


def _hung(disk: FaultyDisk, rule: Rule, dice: random.Random) -> int:
    disk.set(rule)
    time.sleep(dice.uniform(0, MOMENT_S))
    return _healed(disk, dice)


# its files, under it -------------------------------------------------------------------------------------------------


def _to_segments(disk: Path, change: Callable[[Path, random.Random], None], dice: random.Random) -> int:
    """Changes each segment with one chance in two."""
    chosen = [path for path in sorted(disk.glob("*.seg")) if dice.random() < 0.5]
    changed = 0
    for path in chosen:
        with contextlib.suppress(FileNotFoundError):  # the well has deleted it meanwhile
            change(path, dice)
            changed += 1
    return changed


def _flip(path: Path, dice: random.Random) -> None:
    """One byte in each 64 KiB: several in each block."""
    fd = os.open(path, os.O_RDWR)
    try:
        for at in range(_HEAD + dice.randrange(_STRIDE), os.fstat(fd).st_size, _STRIDE):
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes(b ^ (1 << dice.randrange(8)) for b in byte), at)
    finally:
        os.close(fd)


def _cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size + 1))


def _delete(path: Path, dice: random.Random) -> None:
    path.unlink()


def _swap(disk: Path, dice: random.Random) -> int:
    """Two of them have each other's bytes; their names and the well's open files stay."""
    segments = sorted(disk.glob("*.seg"))
    if len(segments) < 2:
        return 0
    one, other = dice.sample(segments, 2)
    try:
        first, second = one.read_bytes(), other.read_bytes()
    except FileNotFoundError:
        return 0  # the well has deleted one meanwhile
    one.write_bytes(second)
    other.write_bytes(first)
    return 2


def _misplace(disk: Path, dice: random.Random) -> int:
    """As writes that went to another place: pieces of one segment lie on others of its own or of another one, whole
    pages of good frames where other frames are expected. Where they belong they still are."""
    changed = 0
    for path in (segments := sorted(disk.glob("*.seg"))):
        other = dice.choice(segments)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as source, other.open("r+b") as target:
            for _ in range(_PIECES):
                at, to = (_page(dice, file.seek(0, os.SEEK_END)) for file in (source, target))
                source.seek(at)
                target.seek(to)
                target.write(source.read(_STRIDE))
                changed += at != to or path != other
    return changed


def _page(dice: random.Random, size: int) -> int:
    """Where a page begins that is not the first."""
    return _PAGE * dice.randrange(1, max(2, size // _PAGE))
