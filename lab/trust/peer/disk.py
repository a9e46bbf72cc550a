"""vLLM's I/O module on a disk that fails while it reads and writes.

The same faults as befall ours, from the same filesystem. What comes back is compared with what was stored. A read that
hangs does so for `HANGS_S`, and the rows tell how much of that its caller waited for: the module's calls have no limit
of their own, and vLLM does not say that they have.
"""

from __future__ import annotations

import errno
import mmap
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lab.trust.budget import Budget
from lab.trust.report import Row
from stepwell.testing.fuse import FaultyDisk, Rule, why_not

FAILS = "vLLM's fs tier, I/O module: a failing disk's bytes are not handed out"
HANGS = "vLLM's fs tier, I/O module: a hanging read is given up"
HANGS_S = 5.0
HANG = Rule(op="read", name="*.bin", delay=HANGS_S, times=1)

_BLOCK = 64 << 10
_WRITES = {
    "ENOSPC on writes": Rule(op="write", errno=errno.ENOSPC),
    "EIO on writes": Rule(op="write", errno=errno.EIO),
    "lost writes": Rule(op="write", lose=True),
    "torn writes": Rule(op="write", torn=0.5),
    "a bit flipped in writes": Rule(op="write", flip=True),
}
_READS = {
    "EIO on reads": Rule(op="read", errno=errno.EIO),
    "short reads": Rule(op="read", short=0.5),
    "a bit flipped in reads": Rule(op="read", flip=True),
}


@dataclass(slots=True)
class _Seen:
    """By the kind of fault: cases, those in which other bytes than were stored came back, those in which an error was
    told, and files that were left beside the block's."""

    cases: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)


def rows(budget: Budget, version: str) -> list[Row]:
    if why := why_not():
        return [
            Row(name, 0, 0, budget.seed, f"{version}: not tried: {why}", comparison=True) for name in (FAILS, HANGS)
        ]
    dice, seen, waited = budget.dice("peer", "disk"), _Seen(), list[float]()
    with tempfile.TemporaryDirectory(prefix="stepwell-peer-") as folder, FaultyDisk(Path(folder), budget.seed) as disk:
        for kind in (*_WRITES, *_READS):
            for _ in range(budget.of(10, 200)):
                if not budget.over:
                    _one(disk, kind, dice, seen)
        for _ in range(budget.of(1, 20)):
            if not budget.over:
                waited.append(_hung(disk, dice))
    told = ", ".join(
        f"{kind}: {seen.wrong[kind]} of {n} wrong, {seen.refused[kind]} refused, {seen.left[kind]} left"
        for kind, n in seen.cases.items()
    )
    remark = f"{version}: other bytes than were stored, errors, and files left beside the block's: {told}; "
    remark += "it does not claim to check"
    return [
        Row(FAILS, seen.cases.total(), seen.wrong.total(), budget.seed, remark, comparison=True),
        hung_row(HANGS, waited, budget, f"{version}: a thread that loads"),
    ]


def hung_row(promise: str, waited_s: list[float], budget: Budget, who: str) -> Row:
    """Of cases in which a read hung for `HANGS_S`. A violation waited for that, give or take what a machine does."""
    most = f"waited for up to {max(waited_s):.1f} s" if waited_s else "met no hanging read"
    remark = f"{who} {most} when a read hung for {HANGS_S:g} s, which is when the test ended it; no limit is claimed"
    beyond = sum(one >= 0.9 * HANGS_S for one in waited_s)
    return Row(promise, len(waited_s), beyond, budget.seed, remark, comparison=True)


def _one(disk: FaultyDisk, kind: str, dice: random.Random, seen: _Seen) -> None:
    """A block is stored and loaded, and one of these under the fault."""
    from vllm.v1.kv_offload.tiering.fs import io

    path = _new(disk)
    direct = io.probe_o_direct(str(disk.path))
    seen.cases[kind] += 1
    with mmap.mmap(-1, _BLOCK) as memory, memoryview(memory) as view:
        view[:] = stored = dice.randbytes(_BLOCK)
        try:
            disk.set(*([_WRITES[kind]] if kind in _WRITES else []))
            io.batch_store_block([str(path)], view, [0], _BLOCK, direct)
            disk.set(*([_READS[kind]] if kind in _READS else []))
            view[:] = bytes(_BLOCK)
            io.batch_load_block([str(path)], view, [0], _BLOCK, direct)
        except OSError:
            seen.refused[kind] += 1
        else:
            seen.wrong[kind] += view[:] != stored
        finally:
            disk.heal()
    left = list(path.parent.iterdir())
    seen.left[kind] += sum(file != path for file in left)
    for file in left:
        file.unlink()


def _hung(disk: FaultyDisk, dice: random.Random) -> float:
    """Seconds that a load took whose read hung."""
    from vllm.v1.kv_offload.tiering.fs import io

    path, direct = _new(disk), io.probe_o_direct(str(disk.path))
    with mmap.mmap(-1, _BLOCK) as memory, memoryview(memory) as view:
        view[:] = dice.randbytes(_BLOCK)
        io.batch_store_block([str(path)], view, [0], _BLOCK, direct)
        disk.set(HANG)
        began = time.monotonic()
        try:
            io.batch_load_block([str(path)], view, [0], _BLOCK, direct)
        finally:
            waited = time.monotonic() - began
            disk.heal()
    path.unlink()
    return waited


def _new(disk: FaultyDisk) -> Path:
    """Of a block that is not there yet."""
    path = disk.path / "00" / "0.bin"
    path.parent.mkdir(exist_ok=True)
    return path
