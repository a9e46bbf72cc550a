"""Traces of files: which format a file has, and reading it.

A module a format, each with its source. `FORMATS` is in the order in which they are tried, the most specific first.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

import msgspec

from stepwell.errors import ConfigError
from stepwell.simulate.formats import lengths
from stepwell.simulate.formats.conversations import CONVERSATIONS
from stepwell.simulate.formats.form import BAD_LINE, Format, Seen, TraceOptions, in_vain
from stepwell.simulate.formats.lengths import LENGTHS
from stepwell.simulate.formats.lines import lines_of
from stepwell.simulate.formats.mooncake import MOONCAKE
from stepwell.simulate.formats.own import OWN
from stepwell.simulate.traces.problems import Problems, unusable
from stepwell.simulate.traces.trace import Trace

FORMATS = {form.name: form for form in (OWN, CONVERSATIONS, MOONCAKE, LENGTHS)}

_LOOKED_AT = 16  # lines; the first may be malformed
_FIELDS = ["hash_ids", "timestamp", "requests", "blocks", *chain(*lengths.NAMES.values())]


def read(path: Path, wishes: TraceOptions, problems: Problems, format_: str | None = None) -> Trace:
    """The trace in the file `path`, of the named format or else of the one that its first lines fit.

    Raises ConfigError: SW-121 if the format is not known, SW-122 if the file cannot be used, SW-113 as `lines_of`."""
    if format_ is not None and format_ not in FORMATS:
        raise unknown("format", format_, FORMATS)
    lines = lines_of(path, problems)
    looked = list(islice(lines, _LOOKED_AT))
    if not looked:
        raise unusable(problems.source, problems.cut or "it is empty", "see docs/traces.md for what is read")
    form = FORMATS[format_] if format_ else _detected(problems.source, [line for _, line in looked])
    if form.timed:
        in_vain(wishes, problems, "the file says when each request comes")
    name = path.name.removesuffix(".zst").removesuffix(".jsonl").removesuffix(".csv")
    name = name.encode(errors="backslashreplace").decode()  # it may be no UTF-8, and is to stand in JSON
    return form.read(name, chain(looked, lines), wishes, problems)


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """A format, generator or parameter that does not exist, SW-121, with the one that was perhaps meant."""
    known = sorted(known)
    near = get_close_matches(name, known, 1)
    fix = (f"did you mean {near[0]}? " if near else "") + f"There are: {', '.join(known)}"
    return ConfigError("SW-121", what=f"{kind} {name[:80]!r} is not known", why="there is none of this name", fix=fix)


def _detected(source: str, lines: list[bytes]) -> Format:
    seen = [one for one in map(_look, lines) if one]
    for form in FORMATS.values():
        if any(form.fits(one) for one in seen):
            return form
    fields = [name for name in (seen[0] if seen else ()) if name.isprintable()][:12]
    near = {name: close for name in fields for close in get_close_matches(name, _FIELDS, 1) if close != name}
    why = f"its first line has the fields {', '.join(fields)[:200]}" if fields else "its first lines have no fields"
    meant = "".join(f"{name} is perhaps meant to be {close}; " for name, close in near.items())
    known = "; ".join(f"{form.name} ({form.about})" for form in FORMATS.values())
    raise ConfigError("SW-121", what=f"{source} has no known format", why=why, fix=f"{meant}formats are {known}")


def _look(line: bytes) -> Seen | None:
    """The format of a line by itself; None if it fits none."""
    try:
        if line.startswith(b"{"):
            return msgspec.json.decode(line, type=dict[str, object])
        return lengths.csv_cells(line)
    except BAD_LINE:
        return None
