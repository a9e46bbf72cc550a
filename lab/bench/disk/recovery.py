"""How long after a restart the disk tier has found its blocks again: from footers, and from the frames of a segment
that was still open when the well was killed.

Footers: segment files of 256 MiB with the head and footer that the tier's own code makes, and nothing between them: the
frames are holes, since recovery reads none of a closed segment and terabytes need not be written. Open segments are
written by a tier, sealed frames and all, and left without a footer. Each repetition is a process of its own with the
well's threads (4 a directory), which recovers as a well does; timed from the call to its completion.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lab.bench import storage
from lab.bench.disk.lane import LIMIT, THREADS, Arena, Lane
from lab.bench.report import Result, Row
from stepwell.block.frame import frame_bytes, frame_parts
from stepwell.block.layout import GiB, MiB
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.codecs.seal import NO_COMMITMENT
from stepwell.demo.model import cache_folder
from stepwell.demo.page_cache import drop_page_cache
from stepwell.demo.results.stats import Estimate
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io import staging
from stepwell.io.clock import MonotonicClock
from stepwell.io.files import SystemFiles
from stepwell.io.paths import filesystem
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.tiers.disk.directory.room import SUFFIX
from stepwell.tiers.disk.layout import RECORD, Footer, Head
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.tier import DiskTier, Site, segment_bytes
from stepwell.vault.keyring import Keyring

KiB, M = 1 << 10, 1_000_000
_PATIENCE_S = 60.0
_KEYRING = "keyring"


@dataclass(frozen=True, slots=True)
class Footers:
    """Closed segments with so many blocks of `nbytes` in all, spread over `directories`."""

    blocks: int
    nbytes: int
    directories: int = 1


@dataclass(frozen=True, slots=True)
class Size:
    """`limit` of the tier whose open segment, full of blocks of `nbytes`, is scanned."""

    footers: tuple[Footers, ...]
    scans: tuple[int, ...]
    limit: int
    repetitions: int


FULL = Size(
    (
        Footers(100_000, 64 * KiB),
        Footers(M, 64 * KiB),
        Footers(M, 64 * KiB, directories=4),
        Footers(10 * M, 64 * KiB),
        Footers(M, MiB),
        Footers(M, 4 * MiB),
        Footers(15 * M, 4 * MiB),
    ),
    (64 * KiB, MiB, 4 * MiB),
    LIMIT,
    3,
)
QUICK = Size((Footers(5000, 64 * KiB), Footers(200, 4 * MiB, directories=2)), (64 * KiB, 4 * MiB), GiB, 1)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one recovery found and took. Bytes; `read` is what the storage layer read for it, `before` and `most` what
    the process had in memory when it began, and had at most."""

    blocks: int
    segments: int
    seconds: float
    cpu_s: float
    read: int
    before: int
    most: int


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    cache_folder().mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for case in size.footers:
        rows += _footer_rows(case, size.repetitions)
    for nbytes in size.scans:
        rows += _scan_rows(nbytes, size)
    remarks = [
        f"on {filesystem(cache_folder())}; seconds are the least of {size.repetitions}, the interval goes to the most",
        f"each repetition in a new process with {THREADS} threads a directory, after fdatasync and DONTNEED of every"
        " file; inodes stay in the kernel's cache, as when the well was restarted and not the host",
        "from footers: heads and footers are real, frames are holes in sparse files; from frames: all is written",
    ]
    return Result("recovery", rows, {"repetitions": size.repetitions}, remarks)


def _footer_rows(case: Footers, repetitions: int) -> list[Row]:
    with _scratch() as name:
        base = Path(name)
        limit = make_segments(base, case)
        found = [_recovered(base, limit, case.blocks) for _ in range(repetitions)]
    many = f", {case.directories} directories" if case.directories > 1 else ""
    return _rows(f"{case.blocks:,} blocks of {_name(case.nbytes)}{many}, from footers", found)


def _scan_rows(nbytes: int, size: Size) -> list[Row]:
    """Every repetition has a segment of its own, since the one that was scanned has its footer afterwards."""
    found = []
    for _ in range(size.repetitions):
        with _scratch() as name:
            base = Path(name)
            blocks = write_open_segment(base, nbytes, size.limit)
            found.append(_recovered(base, size.limit, blocks))
    what = f"an open segment of {_name(segment_bytes(size.limit))}, {found[0].blocks:,} blocks of {_name(nbytes)}"
    return _rows(f"{what}, from frames", found)


def _rows(what: str, found: Sequence[Recovered]) -> list[Row]:
    best = min(found, key=lambda one: one.seconds)
    seconds = [one.seconds for one in found]
    grown = max(one.most - one.before for one in found)
    return [
        Row(
            what,
            "s",
            Estimate(best.seconds, best.seconds, max(seconds), len(seconds)),
            beside=f"median {np.median(seconds):.3g} s; CPU {best.cpu_s:.3g} s; segments: {best.segments:,}",
        ),
        Row("  blocks a second", "", _one(best.blocks / best.seconds)),
        Row("  read from the device", "MiB", _one(best.read / MiB)),
        Row(
            "  memory at its most",
            "MiB",
            _one(max(one.most for one in found) / MiB),
            beside=f"{grown / MiB:.0f} MiB more than before",
        ),
    ]


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Beside what the other benchmarks write; gone at the end, whatever happens."""
    return tempfile.TemporaryDirectory(prefix="bench-recovery-", dir=cache_folder(), ignore_cleanup_errors=True)


def _one(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _name(nbytes: int) -> str:
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"


# --- what an earlier life left ----------------------------------------------------------------------------------------


def make_segments(base: Path, case: Footers) -> int:
    """Closed segments below `base`, and the keyring that they are of. Returns the limit of each directory that fits.

    Heads and footers are what the tier writes; of the frames there is nothing.
    """
    epoch = Keyring.open(base / _KEYRING).tenant(DEFAULT_TENANT).epochs[0]
    nbytes, full = segment_bytes(LIMIT), capacity(segment_bytes(LIMIT), case.nbytes)
    segments = -(-case.blocks // full)
    buffer = staging.make(Footer.nbytes(full))
    folders = [base / f"disk{n}" for n in range(case.directories)]
    for folder in folders:
        folder.mkdir()
    directories = [SystemFiles(folder) for folder in folders]
    for number in range(segments):
        id, at = secrets.token_bytes(16), number % case.directories
        records = _records(min(full, case.blocks - number * full), case.nbytes)
        head = Head(id, number + 1, nbytes, int(time.time())).pack()
        footer = Footer(id, records, (epoch.segment_key(id)[1],)).pack()
        path = folders[at] / f"{secrets.token_hex(8)}{SUFFIX}"
        path.touch(0o600)
        os.truncate(path, nbytes)
        with directories[at].open(path.name) as file:
            for raw, offset in ((head, 0), (footer, nbytes - len(footer))):
                buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
                file.write(buffer[: len(raw)], offset)
    for files in directories:
        files.close()
    return max(LIMIT, nbytes * -(-segments // case.directories))


def capacity(nbytes: int, payload: int) -> int:
    """Blocks of one shard that a segment of `nbytes` takes."""
    segment = Segment(0, "", b"", 0, nbytes, SegmentPhase.OPEN)
    while segment.fits(frame_bytes(payload), NO_COMMITMENT):
        segment.take(frame_bytes(payload), len(frame_parts(payload)), NO_COMMITMENT)
    return segment.blocks


def _records(count: int, payload: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    pages = frame_bytes(payload) // staging.PAGE
    records = np.zeros(count, RECORD)
    records["block"] = np.frombuffer(os.urandom(32 * count), "V32")
    records["page"] = 1 + pages * np.arange(count)
    records["pages"] = pages
    return records


def write_open_segment(base: Path, payload: int, limit: int) -> int:
    """A segment full of sealed blocks and without a footer, as it lies there when the well is killed. Returns how many
    they are."""
    keyring, folder = Keyring.open(base / _KEYRING), base / "disk0"
    folder.mkdir()
    count = capacity(segment_bytes(limit), payload)
    arena = Arena(payload, count)
    try:
        lane = Lane(folder, sealed=True, limit=limit, keyring=keyring)
        try:
            lane.spill(lane.entries(arena))
        finally:
            lane.close()
    finally:
        arena.close()
    return count


# --- the next life, in a process of its own ---------------------------------------------------------------------------


def _recovered(base: Path, limit: int, blocks: int) -> Recovered:
    """Raises RuntimeError if not all of these blocks were found."""
    drop_page_cache(base)
    command = [sys.executable, "-m", "lab.bench.disk.recovery", str(base), str(limit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = Recovered(**json.loads(done.stdout))
    if found.blocks != blocks:
        raise RuntimeError(f"{found.blocks} blocks were found, not {blocks}")
    return found


def recover(base: Path, limit: int) -> Recovered:
    """What a well does at its start, over all directories of `base`."""
    folders = sorted(path for path in base.iterdir() if path.is_dir())
    sealing = Sealing(Keyring.read(base / _KEYRING), sealed=True, wall=time.time)
    wakeup, clock = Wakeup(), MonotonicClock()
    executor = ThreadExecutor(wakeup, THREADS * len(folders))
    sites = [Site(SystemFiles(folder), limit, 0) for folder in folders]
    tier = DiskTier(sites, executor, clock, time.time, sealing)
    gc.disable()  # as in the well, which collects when it is idle
    done: list[int] = []
    before, read = _memory("VmRSS"), storage.moved([os.getpid()]).read
    cpu, began = time.process_time(), time.perf_counter()
    tier.recover(done.append)
    while not done:
        if not executor.complete(clock, 0.0) and not done:
            wakeup.wait(1.0)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    read = storage.moved([os.getpid()]).read - read
    if tier.counts.errors:
        raise RuntimeError(f"not everything could be read: {tier.counts.errors}")
    segments = tier.figures()["segments"]
    executor.close(_PATIENCE_S)
    tier.close()
    return Recovered(done[0], segments, seconds, cpu_s, read, before, _memory("VmHWM"))


def _memory(which: str) -> int:
    """Bytes in memory now (VmRSS), or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{which}:"))


if __name__ == "__main__":
    print(json.dumps(asdict(recover(Path(sys.argv[1]), int(sys.argv[2])))))
