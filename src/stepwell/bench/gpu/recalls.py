"""Prompts that are spilled, and recalled from host memory and from disk, through both halves and a real well.

Nothing is computed for them. Their pages are filled with random bytes, and what is recalled must have the same
signatures. Shorter prompts are the beginnings of longer ones, so each block is spilled once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stepwell.bench import wells
from stepwell.bench.gpu import card
from stepwell.bench.gpu.engine import Engine
from stepwell.bench.gpu.kv import Kv
from stepwell.bench.gpu.stage import threads_seconds
from stepwell.bench.processes import cpu_seconds
from stepwell.client import control

_AT_ONCE = 512


@dataclass(slots=True)
class Moved:
    """Bytes that went one way, and processor seconds for them: of the engine's hooks and stepwell's threads in its
    process, and of the well."""

    nbytes: int = 0
    engine_s: float = 0.0
    well_s: float = 0.0


@dataclass(slots=True)
class Recalls:
    """By tier and length: seconds from the scheduler's first ask until all pages were filled."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    joules: dict[tuple[str, int], float] = field(default_factory=dict)
    spilled: Moved = field(default_factory=Moved)
    recalled: Moved = field(default_factory=Moved)
    partial: list[str] = field(default_factory=list)
    differing: int = 0
    compared: int = 0


class Prompts:
    """`engine` has no other requests."""

    def __init__(self, engine: Engine, home: Path, longest: int) -> None:
        self._engine, self._home = engine, home
        source = random.Random(3)
        self._tokens = [source.randrange(32_000) for _ in range(longest)]
        self._expected: list[int] = []
        self._well = wells.process(home)
        self.found = Recalls()

    def spill(self, length: int) -> None:
        """What of the first `length` tokens is not in the well. Raises TimeoutError."""
        engine, page = self._engine, self._engine.kv.shape.page
        engine.kv.fill(length)
        missing = length // page - len(self._expected)
        wanted = engine.spilled_bytes + missing * engine.kv.shape.page_bytes
        with _Counted(engine, self._well, self.found.spilled, lambda: engine.spilled_bytes):
            live = engine.add(self._tokens[:length], None, dry=True, recall="never")
            try:
                engine.run(lambda: len(live.pages) >= length // page)
                self._expected += signatures(engine.kv, live.pages[len(self._expected) : length // page])
                engine.run(lambda: engine.spilled_bytes >= wanted)
            finally:
                engine.abort(live)
            engine.run()

    def recall(self, tier: str, length: int) -> bool:
        """Once; False, and said, if not all of it came from there."""
        engine = self._engine
        before = card.joules()
        with _Counted(engine, self._well, self.found.recalled, lambda: engine.recalled_bytes):
            live = engine.serve(self._tokens[:length], 0, dry=True)
        came = live.receipt.get("tiers", {}).get(tier, 0)
        if came != length:
            self.found.partial.append(f"{came} of {length} tokens came from {tier}")
            return False
        self.found.seconds.setdefault((tier, length), []).append(live.receipt["recall_ms"] / 1e3)
        after = card.joules()
        if before is not None and after is not None:
            self.found.joules[tier, length] = after - before
        return True

    def check(self, tier: str, length: int) -> None:
        """As `recall`, into pages that were overwritten, and what arrived is compared. Its time is no measurement's."""
        engine = self._engine
        engine.kv.fill(length + 1)
        pages: list[int] = []
        live = engine.add(self._tokens[:length], 0, dry=True)

        def arrived() -> bool:
            if live.pages:
                pages[:] = live.pages
            return live.done

        engine.run(arrived)
        engine.run()
        if live.receipt.get("recalled_tokens", 0) == length:
            found = signatures(engine.kv, pages[: length // engine.kv.shape.page])
            expected = self._expected[: len(found)]
            self.found.differing += sum(a != b for a, b in zip(found, expected, strict=True))
            self.found.compared += len(found)
        else:
            self.found.partial.append(f"{live.receipt.get('recalled_tokens', 0)} of {length} tokens came from {tier}")

    def written(self, deadline: float) -> bool:
        """Waits until all is on disk, or that moment of `time.monotonic`."""
        shape = self._engine.halves.shape
        blocks = len(self._expected) // shape.pages_per_block
        while time.monotonic() < deadline:
            stats = control.stats(self._home, seconds=10)
            if int(stats.get("disk_blocks", 0)) >= blocks and not int(stats.get("disk_write_queue_bytes", 0)):
                return True
            time.sleep(0.1)
        return False

    def forget_host(self) -> None:
        control.clear(self._home, ["host"])


class _Counted:
    """Adds what was moved in here, and what it took, to `moved`."""

    def __init__(self, engine: Engine, well: int, moved: Moved, nbytes: Any) -> None:
        self._engine, self._well, self._moved, self._nbytes = engine, well, moved, nbytes

    def _now(self) -> tuple[int, float, float]:
        spent = self._engine.hook_s + threads_seconds()
        return self._nbytes(), spent, cpu_seconds([self._well]).get(self._well, 0.0)

    def __enter__(self) -> None:
        self._before = self._now()

    def __exit__(self, *_: object) -> None:
        nbytes, engine_s, well_s = (b - a for a, b in zip(self._before, self._now(), strict=True))
        self._moved.nbytes += int(nbytes)
        self._moved.engine_s += engine_s
        self._moved.well_s += well_s


def signatures(kv: Kv, pages: Sequence[int]) -> list[int]:
    """A number for each page that any changed byte changes, almost surely."""
    found: list[int] = []
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randint(1 << 62, (kv.shape.row_bytes // 4,), generator=generator).to(kv.buffer.device) * 2 + 1
        for _ in kv.words
    ]
    for at in range(0, len(pages), _AT_ONCE):
        which = torch.tensor(list(pages[at : at + _AT_ONCE]), device=kv.buffer.device)
        total = torch.zeros(len(which), dtype=torch.int64, device=kv.buffer.device)
        for layer, weight in zip(kv.words, weights, strict=True):
            numbers = layer[which].reshape(len(which), -1).view(torch.int32).to(torch.int64)
            total += (numbers * weight).sum(1)
        found += total.tolist()
    return found
