"""vLLM's I/O module, called as its filesystem tier calls it: with files that are damaged between the storing and the
loading of a block, and on a disk that fails while it writes or reads.

What comes back is compared with what was stored. A read that hangs does so for `HANGS_S`, and the row tells how much of
that its caller waited for: the module's calls have no limit of their own, and vLLM does not say that they have.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lab.trust.budget import Budget
from lab.trust.report import Row
from stepwell.testing.fuse import FaultyDisk, Rule, why_not

DAMAGED = "vLLM's fs tier, I/O module: a damaged file is not handed out"
FAILS = "vLLM's fs tier, I/O module: a failing disk's bytes are not handed out"
HANGS = "vLLM's fs tier, I/O module: a hanging read is given up"
HANGS_S = 5.0
HANG = "a read that hangs"
_BLOCK = 64 << 10


def _flip(path: Path, other: Path, dice: random.Random) -> None:
    """One bit, anywhere."""
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, other: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(_BLOCK))


def _extend(path: Path, other: Path, dice: random.Random) -> None:
    with path.open("ab") as file:
        file.write(dice.randbytes(4096))


def _zero(path: Path, other: Path, dice: random.Random) -> None:
    """The last pages, as after a power cut that came before they were on disk."""
    pages = dice.randrange(1, _BLOCK // 4096 + 1)
    with path.open("r+b") as file:
        file.seek(-4096 * pages, os.SEEK_END)
        file.write(bytes(4096 * pages))


def _swap(path: Path, other: Path, dice: random.Random) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


_DAMAGE: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "one bit flipped": _flip,
    "cut short": _cut,
    "made longer": _extend,
    "end zeroed": _zero,
    "two files swapped": _swap,
}
_RULES = {
    "ENOSPC on writes": Rule(op="write", errno=errno.ENOSPC),
    "EIO on writes": Rule(op="write", errno=errno.EIO),
    "lost writes": Rule(op="write", lose=True),
    "torn writes": Rule(op="write", torn=0.5),
    "a bit flipped in writes": Rule(op="write", flip=True),
    "EIO on reads": Rule(op="read", errno=errno.EIO),
    "short reads": Rule(op="read", short=0.5),
    "a bit flipped in reads": Rule(op="read", flip=True),
}


@dataclass(slots=True)
class _Seen:
    """By the kind of fault: cases, those in which other bytes than were stored came back, those in which an error was
    told, and files that were left beside the blocks'. What is left came back as it was stored, as when only a file's
    end had grown."""

    cases: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    mode: str = ""
    waited_s: list[float] = field(default_factory=list)

    def row(self, promise: str, kinds: Iterable[str], seed: int, version: str) -> Row:
        told = ", ".join(
            f"{kind}: {self.wrong[kind]} of {self.cases[kind]} handed out, {self.refused[kind]} refused, "
            f"{self.left[kind]} left"
            for kind in kinds
        )
        remark = f"{version}: other bytes than were stored, errors, and files left beside the block's: {told}; files "
        remark += f"have mode {self.mode}; it does not claim to check"
        cases, wrong = (sum(counts[kind] for kind in kinds) for counts in (self.cases, self.wrong))
        return Row(promise, cases, wrong, seed, remark, comparison=True)


def rows(budget: Budget, version: str) -> list[Row]:
    dice, seen, why = budget.dice("peer", "io"), _Seen(), why_not()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepwell-peer-")))
        disk = None if why else stack.enter_context(FaultyDisk(folder, budget.seed))
        for kind in (*_DAMAGE, *((*_RULES, HANG) if disk else ())):
            most = (40, 500) if kind in _DAMAGE else (10, 200) if kind in _RULES else (1, 20)
            for _ in range(budget.of(*most)):
                if not budget.over:
                    _one(folder, disk, kind, dice, seen)
    damaged = seen.row(DAMAGED, _DAMAGE, budget.seed, version)
    if why:
        told = f"{version}: not tried: {why}"
        return [damaged, *(Row(name, 0, 0, budget.seed, told, comparison=True) for name in (FAILS, HANGS))]
    hangs = hung_row(HANGS, seen.waited_s, budget.seed, f"{version}: a thread that loads")
    return [damaged, seen.row(FAILS, _RULES, budget.seed, version), hangs]


def hung_row(promise: str, waited_s: list[float], seed: int, who: str) -> Row:
    """Of cases in which a read hung for `HANGS_S`. A violation waited for that, give or take what a machine does."""
    most = f"waited for up to {max(waited_s):.1f} s" if waited_s else "met no hanging read"
    remark = f"{who} {most} when a read hung for {HANGS_S:g} s, which is when the test ended it; no limit is claimed"
    return Row(promise, len(waited_s), sum(one >= 0.9 * HANGS_S for one in waited_s), seed, remark, comparison=True)


def _one(folder: Path, disk: FaultyDisk | None, kind: str, dice: random.Random, seen: _Seen) -> None:
    """Two blocks are stored, and the first one is loaded: one of these under the fault, or damage in between."""
    from vllm.v1.kv_offload.tiering.fs import io

    place = disk.path if disk is not None and kind not in _DAMAGE else folder
    direct, rule = io.probe_o_direct(str(place)), _RULES.get(kind, Rule(op="read", delay=HANGS_S, times=1))
    paths = [place / "00" / f"{number}.bin" for number in range(2)]
    paths[0].parent.mkdir()
    seen.cases[kind] += 1
    with mmap.mmap(-1, 2 * _BLOCK) as memory, memoryview(memory) as view:
        view[:] = stored = dice.randbytes(2 * _BLOCK)
        try:
            if disk is not None and rule.op == "write" and place is disk.path:
                disk.set(rule)
            io.batch_store_block([str(path) for path in paths], view, [0, _BLOCK], _BLOCK, direct)
            seen.mode = f"{stat.S_IMODE(paths[0].stat().st_mode):04o}"
            if kind in _DAMAGE:
                _DAMAGE[kind](paths[0], paths[1], dice)
            elif disk is not None and rule.op == "read":
                disk.set(rule)
            view[:] = bytes(2 * _BLOCK)
            began = time.monotonic()
            io.batch_load_block([str(paths[0])], view, [0], _BLOCK, direct)
            if kind == HANG:
                seen.waited_s.append(time.monotonic() - began)
        except OSError:
            seen.refused[kind] += 1
        else:
            seen.wrong[kind] += view[:_BLOCK] != stored[:_BLOCK]
        finally:
            if disk is not None:
                disk.heal()
    seen.left[kind] += sum(path not in paths for path in paths[0].parent.iterdir())
    shutil.rmtree(paths[0].parent)
