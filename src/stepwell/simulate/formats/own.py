"""stepwell's own format: a header, then a request a line with run-length ids. docs/traces.md describes it.

{"format":"stepwell-trace","version":1,"name":"zipf","block_tokens":512}
{"t":0.0,"in":9216,"out":310,"session":0,"blocks":[[0,4],[96,14]]}
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from stepwell.simulate.formats.form import BAD_LINE, Format, Positive, Run, Seconds, Seen, Tokens, TraceOptions, why
from stepwell.simulate.formats.lines import Lines, writer
from stepwell.simulate.traces.assemble import Rows, assemble
from stepwell.simulate.traces.problems import Problems, unusable
from stepwell.simulate.traces.runs import Runs, runs_of
from stepwell.simulate.traces.trace import Trace

FORMAT, VERSION = "stepwell-trace", 1


class _Header(msgspec.Struct):
    format: str
    version: int
    block_tokens: Positive
    name: str = ""


class _Row(msgspec.Struct, omit_defaults=True):
    time: Seconds = msgspec.field(name="t")
    input: Tokens = msgspec.field(name="in")
    output: Tokens = msgspec.field(name="out", default=0)
    session: str | int | None = None
    blocks: list[Run] = []


def save(trace: Trace, path: Path) -> None:
    """Writes `trace`, compressed if the name of `path` ends in .zst; reading it gives the same trace. Raises OSError,
    and ConfigError SW-113 if the package for zstd is not installed."""
    with writer(path) as file:
        file.writelines(_lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    yield encode(_Header(FORMAT, VERSION, trace.block_tokens, trace.name)) + b"\n"
    columns = (trace.times.tolist(), trace.inputs.tolist(), trace.outputs.tolist(), trace.sessions.tolist())
    for i, (time, inputs, outputs, session) in enumerate(zip(*columns, strict=True)):
        blocks = [(first, count) for first, count in runs_of(trace.request(i))]
        yield encode(_Row(time, inputs, outputs, session if session >= 0 else None, blocks)) + b"\n"


def _read(name: str, lines: Lines, wishes: TraceOptions, problems: Problems) -> Trace:
    header = _header(lines, problems)
    fine, block = header.block_tokens, wishes.block_tokens or header.block_tokens
    if block % fine:
        why_not = f"its blocks have {fine} tokens, which does not divide {block}"
        raise unusable(problems.source, why_not, f"ask for a multiple of {fine}")
    decode = msgspec.json.Decoder(_Row).decode
    rows, starts, firsts, counts = Rows(), array("q", [0]), array("q"), array("q")
    for number, line in lines:
        try:
            row = decode(line)
        except BAD_LINE as error:
            problems.line(number, why(error))
            continue
        named = sum(count for _, count in row.blocks)
        if named > -(-row.input // fine):
            problems.line(number, f"{named} blocks of {fine} tokens for a prompt of {row.input}")
            continue
        rows.add(row.time, row.input, row.output, row.session)
        firsts.extend(first for first, _ in row.blocks)
        counts.extend(count for _, count in row.blocks)
        starts.append(len(firsts))
    columns = rows.columns(problems)
    runs = Runs(*(np.array(numbers, np.int64) for numbers in (starts, firsts, counts)))
    if block == fine:
        blocks = runs.blocks()
    else:
        blocks, problems.renamed = runs.regrouped(block // fine, columns.inputs // fine)
    return assemble(header.name or name, block, columns, blocks, problems)


def _header(lines: Lines, problems: Problems) -> _Header:
    number, line = next(lines, (1, b""))
    try:
        header = msgspec.json.decode(line, type=_Header)
    except BAD_LINE as error:
        raise unusable(problems.source, f"line {number} is no header: {why(error)}", "see docs/traces.md") from error
    if header.format != FORMAT or header.version != VERSION:
        raise unusable(
            problems.source,
            f"it is {header.format[:40]!r} version {header.version}; this stepwell reads {FORMAT!r} {VERSION}",
            "read it with the stepwell that wrote it",
        )
    return header


def _fits(seen: Seen) -> bool:
    return isinstance(seen, dict) and (seen.get("format") == FORMAT or {"t", "in", "blocks"} <= seen.keys())


OWN = Format("stepwell", "a header line with format stepwell-trace, then JSON lines", _fits, _read)
