"""What slabs may take of memory and files of ours of their disks, and whether the well's own books say what lies there.

A well may be given less than the one before it, and a power cut may bring back files that had been deleted: then more
than the limit lies there, and it only gets less, until the well has brought it down to the limit.
"""

from __future__ import annotations

from lab.sim.life import Life
from lab.sim.oracle import Violation
from lab.sim.world import World
from stepwell.block.layout import PAGE
from stepwell.tiers.disk.directory.directory import DiskDirectory
from stepwell.tiers.disk.segment import SegmentPhase


class Bounds:
    """Looks at memory and disks after each step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._life: Life | None = None
        self._most: list[int] = []

    def look(self) -> None:
        """Raises Violation."""
        world = self._world
        life = world.life
        if life is None:
            return
        _memory(world, life)
        if life is not self._life:
            self._life, self._most = life, [disk.used for disk in world.disks]
        for at, disk in enumerate(world.disks):
            used = disk.used
            if used > max(disk.limit, self._most[at]):
                raise Violation("books", f"{used} bytes lie in directory {at}, of at most {disk.limit}")
            self._most[at] = min(used, self._most[at])
        for files in life.files:
            if files.crowded:
                raise Violation("books", files.crowded)


def _memory(world: World, life: Life) -> None:
    """The well's slabs, and those of this well that were given back while a process still keeps their pages."""
    slabs = {slab.number: slab.layout.nbytes for slab in life.hierarchy.slabs.slabs.values()}
    for worker in (worker for engine in world.engines for worker in engine.workers):
        slabs |= {number: nbytes for (session, number), nbytes in worker.kept.items() if session in world.sessions}
    if sum(slabs.values()) > life.hierarchy.limits.host_bytes:
        raise Violation("books", f"slabs of {sum(slabs.values())} bytes, of at most {life.hierarchy.limits.host_bytes}")


def directories(world: World) -> list[DiskDirectory]:
    assert world.life is not None
    found: list[DiskDirectory] = world.life.hierarchy.stack.levels[0].tier._directories  # type: ignore[attr-defined]
    return found


def has_room(world: World) -> bool:
    """Two blocks can be written: some directory takes part, and each that does can hold all of their parts and a
    segment more beside what it must keep because it cannot read it. One that cannot refuses its share of what is
    written, whatever room others have; without that segment, each block takes the place of the last. One that could not
    be listed when the well was opened takes no part."""
    model = world.setup.models[0]
    frames = 2 * (len(model.shape.parts) if model.groups else 1) * model.frames
    segments = 1 + -(-frames // (world.setup.segment - 2 * PAGE))
    part = [directory for directory in directories(world) if directory.ready]
    for directory in part:
        ours = sum(s.nbytes for s in directory.segments.values() if s.phase is not SegmentPhase.KEPT)
        if directory.limit - (directory.used - ours) < segments * directory.segment_bytes:
            return False
    return bool(part)


def balance(world: World) -> None:
    """Nothing is under way and nothing goes wrong any more: a directory counts what lies there, neither less nor more,
    and has not more than it may, but for what it must keep. It may count too much for a file that it could not look at,
    that somebody else has deleted, or that could not be made and then not be deleted either, as far as it knew; where
    it could not even list them, it writes nothing. Raises Violation."""
    assert world.life is not None
    for at, directory in enumerate(directories(world)):
        if directory.unreadable:
            continue
        disk, files = world.disks[at], world.life.files[at]
        known = {segment.name: segment.nbytes for segment in directory.segments.values()}
        others = {name: len(inode.data) for name, inode in disk.names.items() if name not in known}
        most = sum(known.values()) + sum(others.values()) + files.gone * directory.segment_bytes
        most += sum(segment.nbytes for segment in directory._deletion._left if segment.name not in others)
        if directory.unseen:
            most += len(others) * directory.segment_bytes
        if not disk.used <= directory.used <= most:
            raise Violation("books", f"directory {at} counts {directory.used} bytes: {disk.used} to {most} lie there")
        kept = sum(s.nbytes for s in directory.segments.values() if s.phase is SegmentPhase.KEPT) + sum(others.values())
        if disk.used > max(disk.limit, kept + directory.segment_bytes):
            raise Violation("books", f"{disk.used} bytes lie in directory {at}, of at most {disk.limit}")
