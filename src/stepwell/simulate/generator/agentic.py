"""Coding agents: conversations that grow turn by turn, are compacted when they get too long, and pause as people do.

Independent draws from the tables in `agentic_tables`. Against the recordings that they were fitted to, lengths agree
within some per cent and the ceiling within some tenths of a point; gaps do not come in bursts as recorded ones do, so
small caches do better here than they would in life. docs/traces.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepwell.simulate.generator import agentic_tables as tables
from stepwell.simulate.generator.documents import GeneratedRequests
from stepwell.simulate.generator.parameters import number
from stepwell.simulate.traces import overlay
from stepwell.simulate.traces.assemble import Columns, in_order
from stepwell.simulate.traces.contexts import grown


class Turn(NamedTuple):
    time: float  # seconds since the conversation's first
    context: int  # prompt tokens
    kept: int  # leading tokens shared with the turn before; -1: all of it
    output: int


@dataclass(frozen=True, slots=True)
class Agentic:
    """Parameters. `conversations`: their number, of which `open` are open at once, on average."""

    seed: int = number(0, 0, 2**63 - 1)
    conversations: int = number(346, 1, 20_000)
    open: int = number(overlay.DEFAULT_OPEN, 1, 1_000_000)

    def made(self, block_tokens: int) -> GeneratedRequests:
        rng = np.random.default_rng(self.seed)
        talks = [_conversation(rng) for _ in range(self.conversations)]
        starts = overlay.starts([np.array([turn.time for turn in talk]) for talk in talks], self.open, rng)
        rows = [
            (start + turn.time, turn.context, turn.output, session, turn.kept)
            for session, (start, talk) in enumerate(zip(starts.tolist(), talks, strict=True))
            for turn in talk
        ]
        times, *numbers = (np.array(column) for column in zip(*rows, strict=True))
        inputs, outputs, sessions, kept = (column.astype(np.int64) for column in numbers)
        columns, order = in_order(Columns(times, inputs, outputs, sessions))
        return GeneratedRequests(columns, grown(columns.inputs, columns.sessions, kept[order], block_tokens))


def _conversation(rng: np.random.Generator) -> list[Turn]:
    shares = np.array([band.share for band in tables.BANDS])
    number = int(np.searchsorted(np.cumsum(shares), rng.uniform(0, shares.sum()), side="right"))
    band = tables.BANDS[min(number, len(tables.BANDS) - 1)]
    context = int(_drawn(rng, tables.BAND_POINTS, band.first_context))
    turns = round(_drawn(rng, tables.BAND_POINTS, band.requests))
    cap = max(1.05 * context, rng.uniform(*tables.CAP))
    if band is tables.BANDS[-1]:
        cap = tables.CAP_OF_LAST_BAND
    time = 0.0
    talk = [Turn(time, context, -1, int(_drawn(rng, tables.POINTS, tables.OUTPUT)))]
    for _ in range(turns - 1):
        time += _drawn(rng, tables.GAP_POINTS, tables.GAP)
        grown_to = context + int(_drawn(rng, tables.POINTS, tables.NEW_TOKENS))
        kept = -1
        if grown_to > cap or rng.random() < tables.P_COMPACTION:
            kept = _kept(rng, context)
            after = int(_drawn(rng, tables.POINTS, tables.AFTER_COMPACTION))
            context = max(min(after, context * 4 // 5), kept + 500)
        elif rng.random() < tables.P_INVALIDATION:
            kept = _kept(rng, context)  # as long as before, but changed near its start
        else:
            context = grown_to
        talk.append(Turn(time, context, kept, int(_drawn(rng, tables.POINTS, tables.OUTPUT))))
    return talk


def _kept(rng: np.random.Generator, context: int) -> int:
    return min(context // 2, int(_drawn(rng, tables.POINTS, tables.KEPT_ON_RESET)))


def _drawn(rng: np.random.Generator, points: Sequence[float], quantiles: Sequence[float]) -> float:
    """A random value of the distribution with these quantiles, log-linear between them; below 1 it is 1."""
    return float(np.exp(np.interp(rng.random(), points, np.log(np.maximum(quantiles, 1)))))
