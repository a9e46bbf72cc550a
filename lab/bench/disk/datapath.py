"""The data path from the arena to disk, sealed and plain, and back again, beside what memory, the device and the cipher
give in the same run.

Blocks in shared memory go through the disk tier as they do in a well: batches, threads, O_DIRECT, segments. Beside each
pass runs a bare O_DIRECT loop with as many threads and the same pieces on the same filesystem, on a file in the same
state: newly allocated, or written before. Passes alternate; the best of each counts, since whatever disturbs a pass
slows it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.disk.lane import LIMIT, Arena, Bare, Lane, cipher_work, copy_pass, in_threads, sync
from lab.bench.disk.passes import Pass, timed
from lab.bench.report import Result, Row, Target
from stepwell.demo.model import cache_folder
from stepwell.demo.results.stats import Estimate
from stepwell.hierarchy.arena.records import Entry

KIB, MIB = 1 << 10, 1 << 20
JUDGED = 4 * MIB
LEAST_SPEED, MOST_CPU = 0.85, 1.2


@dataclass(frozen=True, slots=True)
class Size:
    blocks: tuple[int, ...]
    nbytes: int
    repetitions: int
    recycled: bool


FULL = Size((64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB), 512 * MIB, 7, recycled=True)
QUICK = Size((MIB, 4 * MIB), 64 * MIB, 2, recycled=False)


@dataclass(slots=True)
class Passes:
    """All passes of one kind."""

    all: list[Pass] = field(default_factory=list)

    def add(self, one: Pass) -> None:
        self.all.append(one)

    @property
    def speed(self) -> float:
        return max(one.gb_s for one in self.all)

    @property
    def cpu(self) -> float:
        return min(one.cpu_s_gb for one in self.all)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    for nbytes in size.blocks:
        rows += _block_size(nbytes, size)
    remarks = [
        f"{size.nbytes // MIB} MiB a pass, best of {size.repetitions} interleaved passes; CPU seconds per 10^9 bytes"
        " are the least of them and the whole process's, kernel workers not among them",
        "4 threads everywhere but in memcpy; the bare loop moves pieces of the block's size between huge-page buffers"
        " and one file; the cipher pass moves pieces of 1 MiB between the blocks and one buffer a thread",
    ]
    return Result("datapath", rows, {"repetitions": size.repetitions}, remarks)


def _block_size(nbytes: int, size: Size) -> list[Row]:
    arena = Arena(nbytes, size.nbytes // nbytes)
    base = Path(tempfile.mkdtemp(prefix="bench-datapath-", dir=_scratch()))
    try:
        limits = _limits(arena, nbytes, size)
        rows = [
            _row(f"{_name(nbytes)}: memcpy, one thread", limits["copy"]),
            _row(f"{_name(nbytes)}: one AES-256-GCM pass, sealing", limits["seal"]),
            _row(f"{_name(nbytes)}: one AES-256-GCM pass, opening", limits["open"]),
        ]
        for sealed in (True, False):
            rows += _form(base, arena, nbytes, size, limits, sealed=sealed)
        return rows
    finally:
        arena.close()
        shutil.rmtree(base, ignore_errors=True)


def _limits(arena: Arena, nbytes: int, size: Size) -> dict[str, Passes]:
    limits = {"copy": Passes(), "seal": Passes(), "open": Passes()}
    for _ in range(size.repetitions):
        limits["copy"].add(copy_pass(arena, nbytes))
        for name, opening in (("seal", False), ("open", True)):
            limits[name].add(timed(arena.nbytes, lambda opening=opening: cipher_work(arena, opening=opening)))  # type: ignore[misc]
    return limits


def _form(base: Path, arena: Arena, nbytes: int, size: Size, limits: dict[str, Passes], *, sealed: bool) -> list[Row]:
    form = "sealed" if sealed else "plain"
    folder = base / form
    folder.mkdir()
    found = {name: Passes() for name in ("spill", "bare write", "both write", "recall", "bare read", "both read")}
    lane = Lane(folder, sealed=sealed)
    bare = Bare(base, f"bare-{form}", arena.nbytes)
    try:
        for _ in range(size.repetitions):
            entries = lane.entries(arena)
            bare.create()
            _both(found, "spill", lambda entries=entries: lane.spill(entries), "bare write", bare, nbytes, write=True)  # type: ignore[misc]
            sync(folder)
            if sealed:
                found["both write"].add(_together(arena, bare, nbytes, write=True))
                found["both read"].add(_together(arena, bare, nbytes, write=False))
            _both(found, "recall", lambda entries=entries: lane.recall(entries), "bare read", bare, nbytes, write=False)  # type: ignore[misc]
            bare.remove()
        judged = nbytes == JUDGED and sealed
        name = f"{_name(nbytes)} {form}"
        rows = _rows(name, "spill, new segments", found["spill"], found["bare write"], limits["seal"], sealed, judged)
        rows += _beside("write", found["spill"], found["both write"])
        rows += _rows(name, "recall", found["recall"], found["bare read"], limits["open"], sealed, judged)
        rows += _beside("read", found["recall"], found["both read"])
        if judged and size.recycled:
            rows += _recycled(lane, bare, arena, nbytes, size, limits["seal"], name)
        return rows
    finally:
        lane.close()
        bare.close()
        shutil.rmtree(folder, ignore_errors=True)


def _recycled(lane: Lane, bare: Bare, arena: Arena, nbytes: int, size: Size, cipher: Passes, name: str) -> list[Row]:
    """The tier is filled, so that every further segment is a file that was written before; the bare file was, too."""
    while lane.tier.capacity().used + 256 * MIB <= LIMIT:
        lane.spill(lane.entries(arena))
    lane.spill(lane.entries(arena))
    found = {"spill": Passes(), "bare write": Passes()}
    bare.create()
    bare.move(nbytes, write=True)
    for _ in range(size.repetitions):
        entries: list[Entry] = lane.entries(arena)
        _both(found, "spill", lambda entries=entries: lane.spill(entries), "bare write", bare, nbytes, write=True)  # type: ignore[misc]
    bare.remove()
    return _rows(name, "spill, segments written before", found["spill"], found["bare write"], cipher, True, True)


def _both(
    found: dict[str, Passes], ours: str, work: Callable[[], None], theirs: str, bare: Bare, piece: int, *, write: bool
) -> None:
    """One pass of each, the other one first the next time."""
    passes = [
        (ours, lambda: timed(bare.nbytes, work)),
        (theirs, lambda: timed(bare.nbytes, lambda: bare.move(piece, write=write))),
    ]
    for name, measure in passes[:: 1 if len(found[ours].all) % 2 else -1]:
        found[name].add(measure())


def _rows(name: str, what: str, ours: Passes, bare: Passes, cipher: Passes, sealed: bool, judged: bool) -> list[Row]:
    speed = ours.speed / bare.speed
    floor = bare.cpu + (cipher.cpu if sealed else 0.0)
    return [
        Row(
            f"{name}: {what}, speed / bare loop",
            "",
            _one(speed),
            Target(">=", LEAST_SPEED) if judged else None,
            f"{ours.speed:.2f} of {bare.speed:.2f} GB/s",
        ),
        Row(
            f"  CPU / (bare{' + one AES-GCM pass' if sealed else ''})",
            "",
            _one(ours.cpu / floor),
            Target("<=", MOST_CPU) if judged else None,
            f"{ours.cpu:.3f} of {floor:.3f} s/GB",
        ),
    ]


def _together(arena: Arena, bare: Bare, nbytes: int, *, write: bool) -> Pass:
    """The bare loop and the cipher's pass side by side: what both cost while they share the memory."""
    works = [lambda: bare.move(nbytes, write=write), lambda: cipher_work(arena, opening=not write)]
    return timed(bare.nbytes, lambda: in_threads(works))


def _beside(what: str, ours: Passes, both: Passes) -> list[Row]:
    if not both.all:
        return []
    beside = f"{both.cpu:.3f} s/GB, {both.speed:.2f} GB/s"
    return [Row(f"  CPU / (bare {what} and the cipher side by side)", "", _one(ours.cpu / both.cpu), beside=beside)]


def _row(name: str, passes: Passes) -> Row:
    return Row(name, "GB/s", _one(passes.speed), beside=f"{passes.cpu:.3f} CPU s/GB")


def _one(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _name(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _scratch() -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
