"""Recall of one prompt's blocks: read from the tiers below the host, side by side, and copied into the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from stepwell.block.tier import HOST
from stepwell.simulate.fleet.clock import EventClock
from stepwell.simulate.fleet.server import ServerJob
from stepwell.simulate.fleet.tier import SimulatedLevel, SimulatedTier

Part = tuple[SimulatedLevel, int]
"""Consecutive blocks that come from one level."""

Copy = Callable[[int, Callable[[], None]], None]
"""Copies this number of bytes from host memory into the GPU, then calls its second argument."""


def parts_of(found: Sequence[tuple[SimulatedLevel, int]]) -> list[Part]:
    """Parts from levels, each with the position at which its blocks end."""
    ends = [0, *(end for _, end in found)]
    return [(level, end - before) for (level, end), before in zip(found, ends, strict=False)]


@dataclass(slots=True)
class _Reading:
    blocks: int
    job: ServerJob | None = None  # None: it has been read, and only its latency is still to pass


class SimulatedRecall:
    """Recalls blocks of a prompt. `ready(blocks)` is called when this number of leading blocks is in the GPU: all up to
    the cut, or those before the first that did not arrive, because its tier failed or exceeded the limit."""

    def __init__(
        self,
        clock: EventClock,
        block_bytes: int,
        copy: Copy,
        parts: Sequence[Part],
        cut: int,
        ready: Callable[[int], None],
    ) -> None:
        self._clock = clock
        self._block_bytes = block_bytes
        self._copy_in = copy
        self._parts = _up_to(parts, cut)
        self._ready = ready
        self._pending: dict[SimulatedTier, _Reading] = {}
        self._stopped = False

    def begin(self, limit_s: float) -> None:
        for level, blocks in self._parts:
            if isinstance(level, SimulatedTier) and level.name != HOST:
                self._pending.setdefault(level, _Reading(0)).blocks += blocks
        if not self._pending:
            self._copy()
            return
        for tier, reading in self._pending.items():
            nbytes = reading.blocks * self._block_bytes
            reading.job = tier.read(nbytes, partial(self._read, tier), partial(self._lost, tier))
        self._clock.after(limit_s, self._late)

    def stop(self) -> None:
        """Stops waiting for the recall; reads that were requested go on."""
        self._stopped = True

    def _read(self, tier: SimulatedTier) -> None:
        reading = self._pending.get(tier)
        if reading is None:
            return
        tier.read_bytes += reading.blocks * self._block_bytes
        reading.job = None
        self._clock.after(tier.latency_s, lambda: self._landed(tier))

    def _landed(self, tier: SimulatedTier) -> None:
        if self._pending.pop(tier, None) is not None and not self._pending:
            self._copy()

    def _lost(self, tier: SimulatedTier) -> None:
        if self._pending.pop(tier, None) is None:
            return
        self._parts = _short(self._parts, tier, 0)
        if not self._pending:
            self._copy()

    def _late(self) -> None:
        for tier, reading in self._pending.items():
            if reading.job is not None:
                left = tier.give_up(reading.job)
                landed = reading.blocks - -(-left // self._block_bytes)
                tier.read_bytes += int(reading.blocks * self._block_bytes - left)
                self._parts = _short(self._parts, tier, max(0, int(landed)))
        if self._pending:
            self._pending.clear()
            self._copy()

    def _copy(self) -> None:
        if self._stopped:
            return
        blocks = sum(count for _, count in self._parts)
        nbytes = sum(count for level, count in self._parts if isinstance(level, SimulatedTier)) * self._block_bytes
        for level, count in self._parts:
            if isinstance(level, SimulatedTier) and level.name == HOST:
                level.read_bytes += count * self._block_bytes
        if not nbytes:
            self._ready(blocks)
            return
        self._copy_in(nbytes, lambda: self._copied(blocks))

    def _copied(self, blocks: int) -> None:
        if not self._stopped:
            self._ready(blocks)


def _up_to(parts: Sequence[Part], cut: int) -> list[Part]:
    kept: list[Part] = []
    for level, count in parts:
        if (count := min(count, cut)) > 0:
            kept.append((level, count))
            cut -= count
    return kept


def _short(parts: Sequence[Part], tier: SimulatedTier, had: int) -> list[Part]:
    """The leading parts before the first missing block, if only `had` blocks came from `tier`."""
    kept: list[Part] = []
    for level, count in parts:
        if level is tier:
            if had < count:
                return [*kept, (level, had)] if had else kept
            had -= count
        kept.append((level, count))
    return kept
