"""The interface of formats, and the bounds of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from stepwell.simulate.formats.lines import Lines
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace

MAX_TOKENS = 1 << 27  # tokens of one request
MAX_SECONDS = 1e12
MAX_ID = 1 << 60

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=-1000 * MAX_SECONDS, le=1000 * MAX_SECONDS)]
Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Run = tuple[Id, Positive]  # first, count

DEFAULT_BLOCK = 512

Seen = dict[str, object] | list[str]  # a line by itself: a JSON object, or else the columns of a CSV header


class TraceOptions(NamedTuple):
    """Options for reading a trace; None: the format's own default."""

    block_tokens: int | None = None
    open_: int | None = None  # conversations open at once, on average; only for formats that leave their times open


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format. `fits`: whether a line looks like this format; `read`: makes the trace, with the given name.
    `read` reports lines that it leaves out and goes on; it raises ConfigError SW-122 if nothing is left, or if the
    trace as a whole cannot have the requested form. `timed`: its times are those of the file, and `open_` has no
    effect."""

    name: str
    about: str
    fits: Callable[[Seen], bool]
    read: Callable[[str, Lines, TraceOptions, Problems], Trace]
    timed: bool = True


def in_vain(wishes: TraceOptions, problems: Problems, why: str) -> None:
    """Notes that a requested number of open conversations has no effect on this trace, if one was requested."""
    if wishes.open_ is not None:
        problems.notes.append(f"--open {wishes.open_} changes nothing: {why}")


# Exceptions that decoding a line can raise, whatever it holds.
BAD_LINE = (msgspec.MsgspecError, ValueError, RecursionError)


def why(error: Exception) -> str:
    """The error in a line. Names fields and types, never shows their values."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    return str(error).replace("`", "")
