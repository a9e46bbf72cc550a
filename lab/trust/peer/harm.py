"""What befalls a tier between the storing and the recall of blocks: the same for vLLM's files, each of which is one
block, and for a well's segments, which hold many."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lab.trust.peer.module import HANGS_S
from stepwell.block.frame import MAGIC, FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.testing.fuse import Rule

FILES = ("*.bin*", "*.seg")
"""What both call theirs; vLLM's get another ending while they are written."""

Damage = Callable[[Sequence[Path], random.Random], None]


def _nothing(files: Sequence[Path], dice: random.Random) -> None:
    """The control."""


def _flip(files: Sequence[Path], dice: random.Random) -> None:
    """One bit in each 4 KiB."""
    draw = np.random.default_rng(dice.getrandbits(64))
    for path in files:
        content = np.fromfile(path, np.uint8)
        first = np.arange(0, len(content) - PAGE + 1, PAGE)
        content[first + draw.integers(PAGE, size=len(first))] ^= np.uint8(1) << draw.integers(
            8, size=len(first), dtype=np.uint8
        )
        with path.open("r+b") as file:
            file.write(content.data)


def _cut(files: Sequence[Path], dice: random.Random) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def _delete(files: Sequence[Path], dice: random.Random) -> None:
    for path in files:
        path.unlink()


def _swap(files: Sequence[Path], dice: random.Random) -> None:
    """Each block's place has another one's bytes."""
    places = [(path, at, nbytes) for path in files for at, nbytes in _blocks(path)]
    contents = [_read(*place) for place in places]
    for (path, at, _), content in zip(places, contents[1:] + contents[:1], strict=True):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)


def _blocks(path: Path) -> list[tuple[int, int]]:
    """Where the blocks in this file begin, and their bytes."""
    if path.suffix != ".seg":
        return [(0, path.stat().st_size)]
    content, found = path.read_bytes(), list[tuple[int, int]]()
    at = content.find(MAGIC, PAGE)
    while at >= 0:
        header = FrameHeader.parse(content[at : at + PAGE])
        nbytes = frame_bytes(header.payload) if header is not None else PAGE
        if header is not None:
            found.append((at, nbytes))
        at = content.find(MAGIC, at + nbytes)
    return found


def _read(path: Path, at: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(nbytes)


@dataclass(frozen=True, slots=True)
class Harm:
    """First what is `killed`, the well or the engine, too, then `damage` to the files, then `rules` for the disk until
    all has been asked for; `amid`: the well is killed again and again meanwhile. `shown`: blocks that a well counts if
    this is met; else it is how often it struck. `ours`: there is nothing like it without a well."""

    name: str
    damage: Damage = _nothing
    rules: tuple[Rule, ...] = ()
    killed: Literal["", "well", "both"] = ""
    amid: bool = False
    shown: Literal["", "blocks read", "blocks refused", "blocks written"] = ""
    ours: bool = False


def _full() -> tuple[Rule, ...]:
    return tuple(
        Rule(op=op, name=name, errno=errno.ENOSPC) for op in ("write", "create", "fallocate") for name in FILES
    )


HANG = Harm("a hanging read", rules=tuple(Rule(op="read", name=name, delay=HANGS_S, times=1) for name in FILES))
HARMS = (
    Harm("nothing stored yet", killed="both", shown="blocks written", ours=True),
    Harm("untouched", shown="blocks read"),
    HANG,
    Harm("well killed between storing and recall", killed="well", shown="blocks read", ours=True),
    Harm("engine and well killed and started again", killed="both", shown="blocks read", ours=True),
    Harm("well killed in the middle of requests", amid=True, ours=True),
    Harm("one bit in 4 KiB flipped", _flip, shown="blocks refused"),
    Harm("swapped", _swap, shown="blocks refused"),
    Harm("cut to half", _cut, shown="blocks refused"),
    Harm("EIO on reads", rules=tuple(Rule(op="read", name=name, errno=errno.EIO) for name in FILES)),
    Harm("files deleted, ENOSPC on writes", _delete, _full(), killed="well"),
)
"""In this order: what was harmed has been computed and stored again when the next one comes, and a killed well has
forgotten what the disk did before. What vLLM's tier has computed while nothing is stored is what all is compared
with."""
