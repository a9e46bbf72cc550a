"""Prompts that are spilled, and recalled from host memory and from disk, through both halves and a real well.

Nothing is computed for them: what is written into their pages tells only of its place, and what is recalled is compared
with that. Shorter prompts are the beginnings of longer ones, so each block is spilled once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench import wells
from lab.bench.gpu import card
from lab.bench.gpu.engine.compute import Marks
from lab.bench.gpu.engine.serving import Engine, Live
from lab.bench.gpu.stage import threads_seconds
from lab.bench.processes import cpu_seconds
from stepwell.client import control

QUIET_S, PATIENCE_S = 0.5, 60.0


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
    """`engine` has no other requests, and writes `marks`."""

    def __init__(self, engine: Engine, marks: Marks, home: Path, longest: int) -> None:
        self._engine, self._marks, self._home = engine, marks, home
        source = random.Random(3)
        self._tokens = [source.randrange(32_000) for _ in range(longest)]
        self._spilled = 0
        self._well = wells.process(home)
        self.found = Recalls()

    def spill(self, length: int) -> None:
        """What of the first `length` tokens is not in the well. Raises TimeoutError."""
        engine = self._engine
        missing = (length - self._spilled) // engine.kv.shape.page * engine.kv.shape.page_bytes
        with _Counted(engine, self._well, self.found.spilled, lambda: engine.spilled_bytes):
            spill(engine, self._tokens[:length], missing)
        self._spilled = length

    def recall(self, tier: str, length: int) -> bool:
        """Once; False, and said, if not all of it came from there."""
        engine = self._engine
        before = card.joules()
        engine.pool.forget()
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
        engine.pool.forget()
        engine.kv.fill(1)
        pages: list[int] = []
        live = engine.add(self._tokens[:length], 0, dry=True)

        def over() -> bool:
            pages[:] = live.pages or pages
            return live.done

        engine.run(over)
        engine.run()
        came = live.receipt.get("tiers", {}).get(tier, 0)
        if came != length:
            self.found.partial.append(f"{came} of {length} tokens came from {tier}")
            return
        self.found.differing += self._marks.differing(pages[: length // engine.kv.shape.page])
        self.found.compared += length // engine.kv.shape.page

    def written(self, deadline: float) -> bool:
        """Waits until all is on disk, or that moment of `time.monotonic`."""
        shape = self._engine.halves.shape
        blocks = self._spilled // shape.block_tokens
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


def spill(engine: Engine, tokens: Sequence[int], nbytes: int, *, dry: bool = False) -> None:
    """Until so many bytes of this prompt have been spilled. What the well had no room for, while it makes its arena
    larger, is offered again. Raises TimeoutError."""
    wanted, deadline = engine.spilled_bytes + nbytes, time.monotonic() + PATIENCE_S
    while engine.spilled_bytes < wanted:
        engine.pool.forget()
        live = engine.add(tokens, None, dry=dry, recall="never")
        engine.run(_settled(engine, live, wanted))
        engine.abort(live)
        engine.run()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{wanted - engine.spilled_bytes} bytes of {nbytes} were not spilled")


def _settled(engine: Engine, live: Live, wanted: int) -> Callable[[], bool]:
    """All is spilled, or nothing more has been for a while."""
    known, since = engine.spilled_bytes, time.monotonic()

    def settled() -> bool:
        nonlocal known, since
        if engine.spilled_bytes != known or live.computed < live.prompt:
            known, since = engine.spilled_bytes, time.monotonic()
        return known >= wanted or time.monotonic() - since > QUIET_S

    return settled
