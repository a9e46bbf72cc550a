"""From the columns that a reader or a generator has to a `Trace` that keeps its promises."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from stepwell.simulate.traces.chains import Blocks, chain, chained, dense, reordered
from stepwell.simulate.traces.problems import Problems, unusable
from stepwell.simulate.traces.trace import Floats, Ints, Trace


class Columns(NamedTuple):
    """Columns of all requests, in any order."""

    times: Floats  # seconds from anywhere
    inputs: Ints
    outputs: Ints
    sessions: Ints  # any numbers; -1 if unknown


class Rows:
    """Columns that grow line by line, as a reader adds requests."""

    def __init__(self) -> None:
        self._times = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions = array("q")
        self._names: dict[str | int | None, int] = {None: -1}

    def __len__(self) -> int:
        return len(self._times)

    def add(self, time: float, inputs: int, outputs: int, session: str | int | None) -> None:
        """Adds one request; sessions are recognised by name and numbered here."""
        self._times.append(time)
        self._inputs.append(inputs)
        self._outputs.append(outputs)
        self._sessions.append(self._names.setdefault(session, len(self._names) - 1))

    def columns(self, problems: Problems) -> Columns:
        """The columns. Requests that stand behind later ones are counted as a problem."""
        times = np.array(self._times, np.float64)
        problems.unsorted = int(np.count_nonzero(times < np.maximum.accumulate(times))) if len(times) else 0
        inputs, outputs, sessions = (
            np.array(column, np.int64) for column in (self._inputs, self._outputs, self._sessions)
        )
        return Columns(times, inputs, outputs, sessions)


def in_order(columns: Columns) -> tuple[Columns, Ints]:
    """The requests sorted by time, those of one time as they stood; and from where each came."""
    order = np.argsort(columns.times, kind="stable")
    times, inputs, outputs, sessions = columns
    return Columns(times[order], inputs[order], outputs[order], sessions[order]), order


def assemble(name: str, block_tokens: int, columns: Columns, blocks: Blocks, problems: Problems) -> Trace:
    """The trace of these requests, in any order and with any ids: sorted, chained and numbered.

    Raises ConfigError SW-122 if there is no request."""
    if not len(columns.times):
        why = f"line {problems.first[0].line}: {problems.first[0].why}" if problems.first else "it is empty"
        raise unusable(problems.source, f"no request in it ({why})", "see docs/traces.md for what is read")
    (times, inputs, outputs, sessions), order = in_order(columns)
    blocks = reordered(blocks, order)
    ids = dense(blocks.ids)
    if not chained(Blocks(blocks.starts, ids)):
        before = int(ids.max()) + 1
        ids = chain(Blocks(blocks.starts, ids))
        problems.renamed += int(ids.max()) + 1 - before
    if len(ids) and int(ids.max()) + 1 == len(ids):
        problems.notes.append("no block is asked for twice: no cache can help here")
    known = sessions >= 0
    sessions[known] = dense(sessions[known])
    return Trace(name, block_tokens, times - times[0], inputs, outputs, sessions, blocks.starts, ids)
