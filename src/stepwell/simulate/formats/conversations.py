"""Recorded conversations, one a line, whose requests name their blocks by run-length ids of their own.

`{"id": ..., "block_size": 64, "hash_id_scope": "local", "requests": [{"t": s, "in": tokens, "out": tokens,
"rle": [[first, count], ...]}, ...]}`; an entry with `requests` of its own is a subagent, their times count from its.
Source: the WEKA traces of github.com/callanjfox/kv-cache-tester, packed. Ids are local to a conversation: what
conversations share is not in the data.

The conversations are laid over each other: in an order and at starts drawn with seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from stepwell.simulate.formats.form import (
    BAD_LINE,
    DEFAULT_BLOCK,
    Format,
    Positive,
    Run,
    Seconds,
    Seen,
    Tokens,
    TraceOptions,
    why,
)
from stepwell.simulate.formats.lines import Lines
from stepwell.simulate.traces import overlay
from stepwell.simulate.traces.assemble import Columns, assemble
from stepwell.simulate.traces.chains import Blocks, dense, room_for, starts_of
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.runs import Runs
from stepwell.simulate.traces.trace import Floats, Ints, Trace


class _Request(msgspec.Struct):
    time: Seconds = msgspec.field(name="t")
    input: Tokens | None = msgspec.field(name="in", default=None)
    output: Tokens = msgspec.field(name="out", default=0)
    rle: list[Run] | None = None
    requests: list[_Request] | None = None


class _Line(msgspec.Struct):
    requests: list[_Request]
    id: str | int = ""
    block_size: Positive = 64
    hash_id_scope: str = "local"


class _Conversation(NamedTuple):
    id: str
    clock: Floats  # [requests] seconds since its first
    inputs: Ints
    outputs: Ints
    blocks: Blocks  # ids dense, its own


def _read(name: str, lines: Lines, wishes: TraceOptions, problems: Problems) -> Trace:
    block, open_ = wishes.block_tokens or DEFAULT_BLOCK, wishes.open_ or overlay.DEFAULT_OPEN
    decode = msgspec.json.Decoder(_Line).decode
    pool: list[_Conversation] = []
    ids = 0
    for number, line in lines:
        try:
            conversation = _conversation(decode(line), block, problems)
        except BAD_LINE as error:
            problems.line(number, why(error))
            continue
        ids += len(conversation.blocks.ids)
        room_for(ids)
        pool.append(conversation)
    problems.notes.append(f"conversations are laid over each other, {open_} open on average; their starts are drawn")
    return _laid_over(f"{name}:open={open_}", block, pool, open_, problems)


def _conversation(line: _Line, block: int, problems: Problems) -> _Conversation:
    """Raises ValueError, with what is wrong."""
    fine = line.block_size
    if line.hash_id_scope != "local":
        raise ValueError("ids that are not local to the conversation are not supported")
    if block % fine:
        raise ValueError(f"blocks of {fine} tokens cannot be regrouped into blocks of {block}")
    rows = sorted(_flat(line.requests), key=lambda row: row[0])
    if not rows:
        raise ValueError("a conversation without requests")
    for _, tokens, _, rle in rows:
        named = sum(count for _, count in rle)
        if named > -(-tokens // fine):
            raise ValueError(f"{named} blocks of {fine} tokens for a prompt of {tokens}")
    times = np.array([row[0] for row in rows])
    inputs, outputs = (np.array([row[column] for row in rows], np.int64) for column in (1, 2))
    flat = np.array([run for row in rows for run in row[3]], np.int64).reshape(-1, 2)
    runs = Runs(starts_of(np.array([len(row[3]) for row in rows])), flat[:, 0], flat[:, 1])
    if block == fine:
        blocks = runs.blocks()
    else:
        blocks, renamed = runs.regrouped(block // fine, inputs // fine)
        problems.renamed += renamed
    clock = np.concatenate([np.zeros(1), np.cumsum(np.diff(times))])
    return _Conversation(str(line.id), clock, inputs, outputs, Blocks(blocks.starts, dense(blocks.ids)))


def _flat(requests: list[_Request]) -> Iterator[tuple[float, int, int, list[Run]]]:
    """Time, lengths and runs of each request, those of subagents on the conversation's clock."""
    for request in requests:
        if request.requests is not None:
            for time, inputs, outputs, runs in _flat(request.requests):
                yield round(request.time + time, 2), inputs, outputs, runs
        elif request.input is None or request.rle is None:
            raise ValueError("a request without in or rle")
        else:
            yield request.time, request.input, request.output, request.rle


def _laid_over(name: str, block: int, pool: list[_Conversation], open_: int, problems: Problems) -> Trace:
    rng = np.random.default_rng(0)
    pool.sort(key=lambda conversation: conversation.id)
    pool = [pool[i] for i in rng.permutation(len(pool))]
    starts = overlay.starts([conversation.clock for conversation in pool], open_, rng)
    times = [np.floor((start + one.clock) * 1000) / 1000 for start, one in zip(starts, pool, strict=True)]
    sessions = np.repeat(np.arange(len(pool)), [len(one.clock) for one in pool])
    before = starts_of(np.array([one.blocks.ids.max(initial=-1) + 1 for one in pool], np.int64))
    ids = [one.blocks.ids + base for one, base in zip(pool, before[:-1], strict=True)]
    columns = Columns(
        np.concatenate([np.zeros(0), *times]),
        _joined([one.inputs for one in pool]),
        _joined([one.outputs for one in pool]),
        sessions,
    )
    counts = _joined([np.diff(one.blocks.starts) for one in pool])
    return assemble(name, block, columns, Blocks(starts_of(counts), _joined(ids)), problems)


def _joined(pieces: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *pieces])


def _fits(seen: Seen) -> bool:
    return isinstance(seen, dict) and isinstance(seen.get("requests"), list)


CONVERSATIONS = Format(
    "conversations", "JSON lines with requests, whose rle are run-length ids", _fits, _read, timed=False
)
