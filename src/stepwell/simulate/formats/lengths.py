"""Traces that give lengths and no ids: JSON lines, or CSV with a header, such as the Azure LLM inference traces.

Names of fields are compared without case and punctuation. Which blocks are shared follows from the session and a shared
length (`contexts.grown`); without either, nothing is.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from stepwell.simulate.formats.form import (
    BAD_LINE,
    DEFAULT_BLOCK,
    MAX_SECONDS,
    MAX_TOKENS,
    Format,
    Seen,
    TraceOptions,
    why,
)
from stepwell.simulate.formats.lines import Lines
from stepwell.simulate.traces.assemble import Rows, assemble, in_order
from stepwell.simulate.traces.contexts import grown
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace

# Names of each field. The first of several in one line counts.
NAMES = {
    "time": ("timestamp", "timestamp_ms", "arrival_time", "arrival_time_ms", "arrival_timestamp", "arrived_at",
             "arrival", "time", "t"),
    "input": ("input_length", "input_tokens", "prompt_tokens", "prompt_length", "num_prompt_tokens",
              "num_prefill_tokens", "context_tokens", "request_tokens", "input_len", "prompt_len", "isl", "input",
              "in"),
    "output": ("output_length", "output_tokens", "completion_tokens", "generated_tokens", "num_generated_tokens",
               "num_decode_tokens", "response_tokens", "output_len", "osl", "output", "out"),
    "session": ("session_id", "session", "conversation_id", "conversation", "chat_id"),
    "shared": ("shared_prefix_length", "shared_prefix_tokens", "shared_length", "shared_tokens", "prefix_length",
               "prefix_tokens"),
}  # fmt: skip
_NEED_IDS = {"hash_ids", "blocks", "rle", "requests"}  # a line with these is of another format


@dataclass(frozen=True, slots=True)
class _Fields:
    """The names that a file uses for its fields."""

    time: str
    unit: float  # seconds of one unit of a time that is a number
    input: str
    output: str | None
    session: str | None
    shared: str | None


@lru_cache(maxsize=64)  # the lines of a file are alike
def _fields_of(names: tuple[str, ...]) -> _Fields | None:
    """The fields among these names; None if there is no time or no input length."""
    known = {_squashed(name): name for name in names}
    time, input_, output, session, shared = (
        next((known[_squashed(name)] for name in among if _squashed(name) in known), None) for among in NAMES.values()
    )
    if time is None or input_ is None:
        return None
    # Milliseconds where the name says so, and in the company that Mooncake's `timestamp` keeps.
    pair = (_squashed(time), _squashed(input_))
    unit = 1e-3 if pair[0].endswith("ms") or pair == ("timestamp", "inputlength") else 1.0
    return _Fields(time, unit, input_, output, session, shared)


def _squashed(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


class _Request(NamedTuple):
    time: float
    input: int
    output: int
    session: str | None
    shared: int  # -1 if unknown


def _read(name: str, lines: Lines, wishes: TraceOptions, problems: Problems) -> Trace:
    rows, shared = Rows(), array("q")
    fields: _Fields | None = None
    for number, record in _records(lines, problems):
        found = _fields_of(tuple(record))
        if found is None:
            problems.line(number, "no time or no input length")
            continue
        fields = found
        try:
            request = _request(fields, record)
        except ValueError as error:
            problems.line(number, str(error))
            continue
        rows.add(request.time, request.input, request.output, request.session)
        shared.append(request.shared)
    if fields is not None:
        unit = "milliseconds" if fields.unit < 1 else "seconds"
        problems.notes.append(f"no block ids: sharing follows from sessions; times that are numbers are {unit}")
    columns, order = in_order(rows.columns(problems))
    block = wishes.block_tokens or DEFAULT_BLOCK
    blocks = grown(columns.inputs, columns.sessions, np.array(shared, np.int64)[order], block)
    return assemble(name, block, columns, blocks, problems)


def _records(lines: Lines, problems: Problems) -> Iterator[tuple[int, dict[str, object]]]:
    """Number and fields of each line; the values of CSV are text."""
    header: list[str] = []
    decode = msgspec.json.Decoder(dict[str, object]).decode
    for number, line in lines:
        try:
            record = decode(line) if line.startswith(b"{") else None
            cells = csv_cells(line) if record is None else []
        except BAD_LINE as error:
            problems.line(number, why(error))
            continue
        if record is not None:
            yield number, record
        elif not header and _fields_of(tuple(cells)):
            header = cells
        elif not header:
            problems.line(number, "neither a JSON object nor a CSV header with a time and an input length")
        elif len(cells) != len(header):
            problems.line(number, f"{len(cells)} columns where the header has {len(header)}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def csv_cells(line: bytes) -> list[str]:
    """The columns of one line. Raises ValueError."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode()]), [])]
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from error


def _request(fields: _Fields, record: dict[str, object]) -> _Request:
    """Raises ValueError, with what is wrong."""
    inputs = _tokens(fields.input, record[fields.input])
    shared = _tokens(fields.shared, record[fields.shared], missing=-1) if fields.shared else -1
    if shared > inputs:
        raise ValueError(f"{fields.shared} is more than {fields.input}")
    session = record[fields.session] if fields.session else None
    if not (session is None or isinstance(session, str | int)):
        raise ValueError(f"{fields.session} is neither text nor a whole number")
    outputs = _tokens(fields.output, record[fields.output], missing=0) if fields.output else 0
    time = _seconds(fields, record[fields.time])
    return _Request(time, inputs, outputs, None if session in (None, "") else str(session), shared)


def _tokens(name: str, value: object, missing: int | None = None) -> int:
    if missing is not None and value in (None, ""):
        return missing
    number = _number(value)
    if not (0 <= number <= MAX_TOKENS and number.is_integer()):  # not if it is NaN
        raise ValueError(f"{name} is not a whole number from 0 to {MAX_TOKENS:,}")
    return int(number)


def _seconds(fields: _Fields, value: object) -> float:
    seconds = _number(value) * fields.unit
    if math.isnan(seconds) and isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            pass
    if not abs(seconds) <= MAX_SECONDS:
        raise ValueError(f"{fields.time} is neither a number of reasonable size nor a date and time")
    return seconds


def _number(value: object) -> float:
    """The value as a number; NaN if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _fits(seen: Seen) -> bool:
    return not _NEED_IDS.intersection(seen) and _fields_of(tuple(seen)) is not None


LENGTHS = Format("lengths", "JSON lines or CSV with a time and an input length", _fits, _read)
