"""The one door for traces: a file of any format that is known, or a generator by its name."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.simulate import formats, generator
from stepwell.simulate.formats.form import MAX_TOKENS, TraceOptions
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace, and what had to be read over to have it."""

    trace: Trace
    problems: Problems


def load(
    source: str,
    *,
    open_: int | None = None,
    block_tokens: int | None = None,
    strict: bool = False,
    format_: str | None = None,
) -> LoadedTrace:
    """The trace that `source` names: a generator (`zipf`, `zipf:seed=3,requests=1000`), else a file.

    `open_`: mean number of conversations open at once, where the trace does not fix their times (64 unless given).
    `block_tokens`: size of the trace's blocks, by default the file's, else 512; for Mooncake's format it is the block
    size that the file was made with. `strict` ends at the first malformed line; `format_` names the format of a file
    whose lines do not show it. Raises ConfigError: SW-121 for a format, generator or parameter that is not known,
    SW-122 for a file or a value that cannot be used, SW-113 if a package is missing.
    """
    for name, value, most in (("open", open_, 1_000_000), ("block_tokens", block_tokens, MAX_TOKENS)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(
                "SW-122", what=f"{name} {value} cannot be used", why=f"it is not from 1 to {most:,}", fix="name another"
            )
    wishes = TraceOptions(block_tokens, open_)
    problems = Problems(source, strict)
    name = source.partition(":")[0]
    if name in generator.GENERATORS and format_ is None:
        return LoadedTrace(generator.make(source, wishes, problems), problems)
    path = os.path.expanduser(source)
    if not os.path.exists(path):  # unlike Path.exists, also says so of what cannot be a path
        raise _nothing(source, path)
    return LoadedTrace(formats.read(Path(path), wishes, problems, format_), problems)


def _nothing(source: str, path: str) -> ConfigError:
    folder, name = os.path.split(path)
    beside: list[str] = []
    with suppress(OSError, ValueError):
        beside = os.listdir(folder or ".")
    near = get_close_matches(name, beside, 1) or get_close_matches(source.partition(":")[0], generator.GENERATORS, 1)
    fix = (f"did you mean {near[0]}? " if near else "") + f"Generators are {', '.join(sorted(generator.GENERATORS))}"
    return ConfigError(
        "SW-121", what=f"there is no trace {source[:200]!r}", why="it is neither a file nor a generator", fix=fix
    )
