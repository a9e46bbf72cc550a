"""Mooncake's JSON lines: a request a line, with a hash for each block of its prompt and all before it.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...], "session_id": ...}`, the last
of which is optional. Source: the traces published with Qin et al., "Mooncake", FAST 2025. The size of a block is not in
the file (theirs have 512 tokens); the last id may name a partly filled block.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from stepwell.simulate.formats.form import (
    BAD_LINE,
    DEFAULT_BLOCK,
    Format,
    Milliseconds,
    Seen,
    Tokens,
    TraceOptions,
    why,
)
from stepwell.simulate.formats.lines import Lines
from stepwell.simulate.traces.assemble import Rows, assemble
from stepwell.simulate.traces.chains import Blocks, room_for, starts_of
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace


class _Row(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Tokens
    hash_ids: list[int]
    output_length: Tokens = 0
    session_id: str | int | None = None


class _Numbers(dict[int, int]):
    """Numbers hashes as they come: they may have any number of bits."""

    def __missing__(self, key: int) -> int:
        self[key] = number = len(self)
        return number


def _read(name: str, lines: Lines, wishes: TraceOptions, problems: Problems) -> Trace:
    block = wishes.block_tokens or DEFAULT_BLOCK
    decode = msgspec.json.Decoder(_Row).decode
    rows, ids, counts = Rows(), array("q"), array("q")
    number_of = _Numbers().__getitem__
    for number, line in lines:
        try:
            row = decode(line)
        except BAD_LINE as error:
            problems.line(number, why(error))
            continue
        named = len(row.hash_ids)
        if named > -(-row.input_length // block):
            problems.line(number, f"{named} ids for {row.input_length} tokens: are blocks of {block} tokens meant?")
            continue
        room_for(len(ids) + named)
        rows.add(row.timestamp / 1000, row.input_length, row.output_length, row.session_id)
        ids.extend(map(number_of, row.hash_ids))
        counts.append(named)
    blocks = Blocks(starts_of(np.array(counts, np.int64)), np.array(ids, np.int64))
    return assemble(name, block, rows.columns(problems), blocks, problems)


def _fits(seen: Seen) -> bool:
    return isinstance(seen, dict) and {"timestamp", "hash_ids"} <= seen.keys()


MOONCAKE = Format("mooncake", "JSON lines with timestamp, input_length and hash_ids", _fits, _read)
