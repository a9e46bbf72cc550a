"""Nonces and names on disk: no nonce comes twice under a key, and no name leads out of the directory. Rows of the
campaign `secrets`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from lab.bench.disk.lane import Arena, Lane
from lab.trust.budget import Budget
from lab.trust.report import Row
from stepwell.block.frame import AES_256_GCM, CHUNK, TAG, FrameHeader, frame_parts
from stepwell.block.layout import PAGE
from stepwell.tiers.disk.site import take
from stepwell.units import Amount
from stepwell.vault.keyring import Keyring

_NONCES = "no nonce twice under one key, over lives that are killed"
_NAMES = "hostile names never lead out of the directory"
_LIMIT = 64 << 20
_BLOCK, _BLOCKS = 96 << 10, 16
_LONGEST_LIFE_S = 0.25


def run(budget: Budget) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as folder:
        yield _nonces(budget, Path(folder) / "lives")
        yield _names(budget, Path(folder) / "names")


# --- nonces -----------------------------------------------------------------------------------------------------------


def _nonces(budget: Budget, folder: Path) -> Row:
    """Writers over one directory, one after the other, each killed while it writes; what each left on disk is read
    before the next one comes. A nonce is used twice where two chunks that differ have it under the same key."""
    folder.mkdir(mode=0o700)
    keyring = Keyring.open(folder.with_name("keyring"))
    dice, lives, segments = budget.dice("nonces"), 0, set[bytes]()
    used: dict[bytes, bytes] = {}
    twice = list[str]()
    for _ in range(budget.of(ci=30, full=2000)):
        if budget.over:
            break
        child = os.fork()
        if not child:
            _write_until_killed(folder, keyring)
        time.sleep(0.05 + dice.random() * _LONGEST_LIFE_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lives += 1
        for header, tags in _frames(folder):
            segments.add(header.segment)
            first = int.from_bytes(header.nonce[4:], "big")
            for part, tag in enumerate(tags):
                # Without the random part, which would hide a number that comes again.
                name = header.commitment + (first + part).to_bytes(8, "big")
                if used.setdefault(name, tag) != tag:
                    twice.append(f"segment {header.segment.hex()[:8]}, number {first + part}")
    if not twice and (len(used) < 10 * lives or len(segments) < 2):
        return Row(_NONCES, 0, 0, budget.seed, f"nothing shown: {len(used)} chunks in {len(segments)} segments")
    remark = f"chunks in {len(segments)} lives of segments; {lives} writers killed"
    return Row(_NONCES, len(used), len(twice), budget.seed, remark, tuple(twice[:5]))


def _write_until_killed(folder: Path, keyring: Keyring) -> NoReturn:
    try:
        arena = Arena(_BLOCK, _BLOCKS)
        lane = Lane(folder, sealed=True, limit=_LIMIT, keyring=keyring)
        draw = np.random.default_rng()
        while True:
            for slot in range(_BLOCKS):
                arena.slab.payload(slot)[:] = draw.integers(0, 256, _BLOCK, np.uint8)
            with contextlib.suppress(RuntimeError):  # the tier may refuse some while it makes room
                lane.spill(lane.entries(arena))
    finally:
        os._exit(1)


def _frames(folder: Path) -> Iterator[tuple[FrameHeader, list[bytes]]]:
    """Each sealed frame that lies in a segment, whole or not, and the tags of its chunks."""
    for path in folder.glob("*.seg"):
        content = path.read_bytes()
        at = PAGE
        while at < len(content):
            header = FrameHeader.parse(content[at : at + PAGE])
            if header is None or header.algorithm != AES_256_GCM:
                at += PAGE
                continue
            tags, end = list[bytes](), at
            for part, nbytes in enumerate(frame_parts(header.payload)):
                size = min(CHUNK, header.payload - part * CHUNK)
                tag = end + (0 if part else PAGE) + size
                tags.append(content[tag : tag + TAG])
                end += nbytes
            if any(b"".join(tags)):  # else its header alone was written
                yield header, tags
            at = end


# --- names ------------------------------------------------------------------------------------------------------------


def _names(budget: Budget, folder: Path) -> Row:
    """A directory full of what somebody else put there, beside files that its links lead to: a tier lives in it, writes
    and reads. What lies outside is untouched, and nothing that is not ours is gone."""
    inside, outside, dice = folder / "disk", folder / "outside", budget.dice("names")
    for made in (folder, inside, outside):
        made.mkdir(mode=0o700)
    targets = [outside / f"{n:016x}.seg" for n in range(16)]
    for target in targets:
        target.write_bytes(dice.randbytes(64 << 10))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in targets}
    for name in _hostile(dice, budget.of(ci=10_000, full=100_000)):
        _put(os.fsencode(inside) + b"/" + name, dice, targets)
    planted = set(os.listdir(os.fsencode(inside)))
    keyring = Keyring.ephemeral()
    arena = Arena(_BLOCK, _BLOCKS)
    site = take(inside, Amount(size=_LIMIT), Amount(size=0))
    site.files.close()
    lane = Lane(inside, sealed=True, limit=_LIMIT, keyring=keyring)
    entries = lane.entries(arena)
    lane.spill(entries)
    lane.recall(entries)
    lane.close()
    arena.close()
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in targets}
    wrong = [f"{path.name} outside was changed" for path in targets if before[path] != after[path]]
    if extra := set(os.listdir(outside)) - {path.name for path in targets}:
        wrong.append(f"{len(extra)} new files outside")
    gone = planted - set(os.listdir(os.fsencode(inside)))
    wrong += [f"{name!r} is gone" for name in sorted(gone)[:5]]
    return Row(_NAMES, len(planted), len(wrong), budget.seed, "links, pipes, folders and files", tuple(wrong))


def _hostile(dice: random.Random, count: int) -> Iterator[bytes]:
    """Names as a file may have them: of segments, dots, control characters, no UTF-8, twins when normalised, long."""
    for n in range(count):
        yield (
            b"%016x.seg" % dice.getrandbits(64),
            b"..." + b"%d" % n,
            b"\n\x1b[2J\x07%d" % n,
            b"\xff\xfe\x80%d" % n,
            f"e\u0301\ufb01{n}".encode(),
            f"\u00e9fi{n}".encode(),
            b"%d" % n + b"x" * (255 - len(str(n))),
            b"..\\..\\%d" % n,
            b"%%2e%%2e%%2f%d" % n,
            b"-rf %d; $(id)" % n,
        )[n % 10]


def _put(path: bytes, dice: random.Random, targets: list[Path]) -> None:
    kind = dice.randrange(10)
    if kind < 6:
        os.symlink(dice.choice([*targets, Path("../outside"), Path("/"), Path("nowhere")]), path)
    elif kind == 6:
        os.mkfifo(path)
    elif kind == 7:
        os.mkdir(path)
    else:
        with open(path, "wb") as file:
            file.write(dice.randbytes(100))
