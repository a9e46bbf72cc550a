"""Power cuts on real filesystems: a real well writes at full speed when its filesystem stops as it lies on the device.

The kernel's shutdown ioctl drops the page cache and what the journal has not written; then the well is killed, the
filesystem is mounted again (its journal is replayed), and a new well is asked for all that was ever spilled: right, or
a miss. In half of the cuts the well's home is there too, and its keyring, which was synced, has to be what it was. A
drive that reorders its own cache is not modelled: the campaign with simulated states does that.

What was synced is found. In half of the cuts the well comes to rest on the way, what it reads back from its disk is
noted, the filesystem is synced, and writing goes on until the cut. Of these blocks only those may be missing whose
segment was emptied since, for a new life: its head is written over, and a copy that was made of a hot one was synced by
nobody. The well counts both, so no more may be missing than that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lab.rig.caller import Caller, Recalled, prefix
from lab.rig.well import RealWell, apart, eventually
from lab.trust.budget import Budget
from lab.trust.report import Row
from stepwell.errors import StepwellError
from stepwell.testing.mounts import Image, image, why_no_mounts

KINDS = ("ext4", "xfs")
OPTIONS = {"ext4": ("commit=1", "commit=1,data=writeback", "commit=1,data=journal", ""), "xfs": ("",)}
MIB = 512
SHARD = 32 << 10
BLOCKS = 64
SERIES = 5
"""Cuts of one filesystem, one after the other: later ones find what earlier ones left."""

LATEST = 12
"""Prefixes that are read back before the sync: they fit into host memory, and the oldest segments go first."""

FOUND_S = 20.0
"""A busy machine may be slow to read all of them: they are asked for again until then."""

_MOST_EVIDENCE = 5


@dataclass
class _Synced:
    """`prefixes` that lay whole on the disk when it was synced, and how many blocks the well had `moved` before."""

    prefixes: list[bytes] = field(default_factory=list)
    moved: int = 0


@dataclass
class _Tally:
    cuts: int = 0
    asked: int = 0
    compared: int = 0
    damaged: int = 0
    unwritten: int = 0
    wrong: int = 0
    keyrings: int = 0
    lost_keyrings: int = 0
    synced: int = 0  # blocks
    moved: int = 0  # of them, at most
    lost: int = 0
    rests: int = 0
    losses: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)  # of wrong blocks
    failures: list[str] = field(default_factory=list)


def run(budget: Budget) -> Iterable[Row]:
    """All kinds at full scale; where only one is asked for, the first that can be had."""
    done = False
    for kind in KINDS:
        why = why_no_mounts(kind)
        if not why and done and budget.scale is None:
            why = "in the size of CI one filesystem is tried"
        tally = _Tally()
        cuts = budget.of(ci=10, full=200)
        dice = budget.dice("powercut", kind)
        while not why and tally.cuts < cuts and not budget.over:
            budget.tell(f"{kind}, cut {tally.cuts} of {cuts}")
            _series(kind, min(SERIES, cuts - tally.cuts), tally, dice)
        done = done or not why
        yield from _rows(kind, why, tally, budget.seed)


def _rows(kind: str, why: str, tally: _Tally, seed: int) -> Iterator[Row]:
    if why:
        yield Row(f"power cut on {kind}: right or a miss", 0, 0, seed, f"not tried: {why}")
        return
    remark = (
        f"blocks compared, of {tally.asked:,} that were asked for after {tally.cuts} cuts; {tally.damaged:,} were "
        f"found damaged; {tally.unwritten} cuts came while blocks waited to be written"
    )
    some, failed = tally.evidence[:_MOST_EVIDENCE], tally.failures[:_MOST_EVIDENCE]
    yield Row(f"power cut on {kind}: right or a miss", tally.compared, tally.wrong, seed, remark, some)
    synced = (
        f"blocks that the well had read from its disk before a sync, in {tally.rests} of the cuts; {tally.moved:,} "
        "more may have been evicted or copied between that and the cut"
    )
    promise = f"power cut on {kind}: what was synced before is found"
    cases, losses = tally.synced - tally.moved, tally.losses[:_MOST_EVIDENCE]
    yield Row(promise, cases, tally.lost, seed, synced, losses)
    yield Row(f"power cut on {kind}: the well starts again", tally.cuts, len(tally.failures), seed, "cuts", failed)
    yield Row(f"power cut on {kind}: the keyring is intact", tally.keyrings, tally.lost_keyrings, seed, "homes there")


def _series(kind: str, cuts: int, tally: _Tally, dice: random.Random) -> None:
    """Cuts of one filesystem. A home outside of it goes through all of them; one that is there is new for each."""
    with ExitStack() as held:
        disk = held.enter_context(image(kind, MIB))
        folder = held.enter_context(apart())
        spilled: list[bytes] = []
        for number in range(cuts):
            disk.unmount()
            disk.mount(dice.choice(OPTIONS[kind]))
            if tally.cuts % 2:
                (disk.path / f"{number}").mkdir(mode=0o700)
                _cut(disk, disk.path / f"{number}/home", disk.path / f"{number}/kv", [], tally, dice)
            else:
                _cut(disk, folder / "home", disk.path / "kv", spilled, tally, dice)


def _cut(disk: Image, home: Path, place: Path, spilled: list[bytes], tally: _Tally, dice: random.Random) -> None:
    """Adds to `spilled`, and asks for all of it after the cut."""
    where = f"cut {tally.cuts}"
    tally.cuts += 1
    keyring = home / "keyring"
    inside = home.is_relative_to(disk.path)
    mib = 256 if inside else 128  # seldom full before the cut, or full and evicting
    well = RealWell(home, host="64MiB", disk=f"{place}:{mib}MiB", disk_reserve="1MiB")
    try:
        with well, Caller(home, SHARD) as caller:
            keys = keyring.read_bytes()
            rests = tally.cuts % 4 in (1, 2)  # with the home there, and without
            synced = _write(disk, well, caller, spilled, dice, rests=rests)
            tally.unwritten += not well.written()
            disk.cut_power()
            for digests in dice.sample(spilled, min(3, len(spilled))):  # it serves on, from host memory
                _judge(caller.recall(digests), tally, where)
            synced.moved = _moved(well) - synced.moved
            well.kill()
        disk.unmount()
        disk.mount()
        if inside:
            tally.keyrings += 1
            if not keyring.exists() or keyring.read_bytes() != keys:
                tally.lost_keyrings += 1
        with well, Caller(home, SHARD) as caller:
            eventually(lambda: "disk_recovery_seconds" in well.stats(), "what is on the disk is known")
            _claim(well, caller, synced, tally, where)
            for digests in spilled:
                _compare(caller, digests, tally, where)
            tally.damaged += well.count("disk_not_recalled_damaged")
    except (StepwellError, OSError) as error:
        tally.failures.append(f"{where}: {error!r}")


def _write(
    disk: Image, well: RealWell, caller: Caller, spilled: list[bytes], dice: random.Random, *, rests: bool
) -> _Synced:
    """Spills at full speed for a while. Somewhere on the way the kernel may write all that it has in memory, as it does
    now and then by itself: while the well writes, or when it has come to rest."""
    synced, now = _Synced(), time.monotonic()
    until = now + dice.uniform(0.0, 2.0)
    sync_at, sync = dice.uniform(now, until), "at rest" if rests else dice.choice(("never", "at once"))
    while not spilled or time.monotonic() < until:
        digests = prefix(dice, BLOCKS)
        spilled.append(digests)
        caller.spill(digests)
        if sync == "at once" and time.monotonic() >= sync_at:
            disk.sync()
            sync = "never"
        elif sync == "at rest" and time.monotonic() >= sync_at:
            before = time.monotonic()
            synced = _rest(disk, well, caller, spilled)
            until += time.monotonic() - before
            sync = "never"
    return synced


def _rest(disk: Image, well: RealWell, caller: Caller, spilled: list[bytes]) -> _Synced:
    """What is read from the disk was written before: it is on the device after the sync that follows."""
    moved = _moved(well)
    eventually(well.written, "all is written")
    well.forget_host()
    whole = [digests for digests in spilled[-LATEST:] if caller.recall_rest(digests).staged == BLOCKS]
    disk.sync()
    return _Synced(whole, moved)


def _moved(well: RealWell) -> int:
    """Blocks whose segment was emptied so far."""
    return well.count("disk_evicted_blocks") + well.count("disk_reinserted_blocks")


def _claim(well: RealWell, caller: Caller, synced: _Synced, tally: _Tally, where: str) -> None:
    """All that was synced is there, but for what was moved between the sync and the cut, or is by this life."""
    blocks, deadline = BLOCKS * len(synced.prefixes), time.monotonic() + FOUND_S
    moved = min(blocks, synced.moved + _moved(well))
    while True:
        missing = blocks - sum(caller.recall_rest(digests).compared for digests in synced.prefixes)
        if missing <= moved or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    tally.rests += bool(blocks)
    tally.synced += blocks
    tally.moved += moved
    tally.lost += max(0, missing - moved)
    if missing > moved:
        tally.losses.append(f"{where}: {missing} of {blocks} blocks are missing, where {moved} may be")


def _compare(caller: Caller, digests: bytes, tally: _Tally, where: str) -> None:
    got = caller.recall_rest(digests)
    tally.asked += got.asked
    tally.compared += got.compared
    _judge(got, tally, where)


def _judge(got: Recalled, tally: _Tally, where: str) -> None:
    tally.wrong += len(got.wrong)
    if got.wrong:
        tally.evidence.append(f"{where}: blocks {got.wrong} are wrong")
