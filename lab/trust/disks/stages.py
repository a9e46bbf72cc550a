"""Where a campaign of disks plays: a real well over a disk that can be harmed, who asks it, and what was counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.rig.caller import Caller
from lab.rig.well import RealWell, apart
from lab.trust.report import Row
from stepwell.testing.fuse import FaultyDisk
from stepwell.testing.mounts import Image, image

SHARD = 32 << 10
_IMAGE_MIB, _LEFT = 140, 256 << 10
_MOST_EVIDENCE = 5


@dataclass
class Tally:
    """Of one promise: `cases`, blocks that were compared for it, `staged` from disk some of them, in so many
    `requests`. `hits`: in how many of its `rounds` what was to go wrong did."""

    cases: int = 0
    violations: int = 0
    requests: int = 0
    staged: int = 0
    rounds: int = 0
    hits: int = 0
    worst_s: float = 0.0
    evidence: list[str] = field(default_factory=list)

    def broken(self, what: str, times: int = 1) -> None:
        self.violations += times
        if len(self.evidence) < _MOST_EVIDENCE:
            self.evidence.append(what)

    def row(self, promise: str, seed: int, remark: str) -> Row:
        return Row(promise, self.cases, self.violations, seed, remark, self.evidence)


@dataclass
class Stage:
    """`below`: where the disk tier's files really are. `known`: prefixes that it may have. With `disk` faults are set
    live, with `image` it is a small filesystem of its own, else a plain directory."""

    well: RealWell
    caller: Caller
    below: Path
    disk: FaultyDisk | None
    image: Image | None
    known: list[bytes] = field(default_factory=list)
    read_only: bool = False

    def fill(self) -> None:
        """Somebody else takes the room that is left."""
        assert self.image is not None
        status = os.statvfs(self.image.path)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - _LEFT))

    def turn_read_only(self) -> None:
        assert self.image is not None
        self.image.turn_read_only()
        self.read_only = True

    @property
    def _ballast(self) -> Path:
        return self.below.parent / "ballast"

    def heal(self) -> None:
        """The disk is well. A filesystem that is read-only becomes so by being mounted anew, under a new well."""
        if self.disk is not None:
            self.disk.heal()
        if self.image is not None and self.read_only:
            self.well.stop()
            self.image.unmount()
            self.image.mount()
            self.read_only = False
            self.well.start()
            self.caller.join()
        self._ballast.unlink(missing_ok=True)


@contextmanager
def staged(seed: int = 0, *, faulty: bool = False, kind: str = "") -> Iterator[Stage]:
    """On a filesystem with faults, on one of this kind in a file, or in a directory."""
    with ExitStack() as held:
        folder = held.enter_context(apart())
        real = held.enter_context(image(kind, _IMAGE_MIB)) if kind else None
        below = (real.path if real else folder) / "below"
        below.mkdir()
        disk = held.enter_context(FaultyDisk(below, seed)) if faulty else None
        place = (disk.path if disk else below) / "kv"
        well = RealWell(folder / "home", host="64MiB", disk=f"{place}:96MiB", disk_reserve="4KiB")
        held.enter_context(well)
        caller = held.enter_context(Caller(well.home, SHARD))
        stage = Stage(well, caller, below / "kv", disk, real)
        if disk is not None:
            held.callback(disk.heal)  # before the well is stopped
        yield stage
