"""The table of engine options, `options.toml`: its rows, and what the installed vLLM has."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("options.toml")
CLASSES = ("identity", "served", "inert", "irrelevant")
ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Row:
    """One field, or one name or pattern of environment variables. The columns are those of the table."""

    of: str
    field: str
    kind: str
    by: str
    code: str
    why: str
    note: str
    tests: tuple[str, ...]
    value: Any
    version: str
    """The one version that has it, where not all need to."""

    @property
    def name(self) -> str:
        return f"{self.of}.{self.field}"


def rows() -> list[Row]:
    with TABLE.open("rb") as file:
        table = tomllib.load(file)["row"]
    return [_row(entry, *field.partition("@")[::2]) for entry in table for field in entry["fields"].split()]


def _row(entry: dict[str, Any], field: str, version: str) -> Row:
    return Row(
        entry["of"],
        field,
        entry["class"],
        entry.get("by", "").format(field=field),
        entry.get("code", ""),
        entry.get("why", ""),
        entry.get("note", ""),
        tuple(entry.get("tests", ())),
        entry.get("value"),
        version,
    )


def parts_of(kind: Any) -> list[type]:
    """The configuration classes that a field of this type may hold."""
    found = [kind] if isinstance(kind, type) and dataclasses.is_dataclass(kind) else []
    return found + [part for argument in typing.get_args(kind) for part in parts_of(argument)]


def fields_of(config: type, whole: set[str]) -> Iterator[tuple[str, str]]:
    """Class and name of every field of `config` and of its parts. A field that holds a part stands for it where `whole`
    names it, else the part's own fields do."""
    met, left = {config}, [config]
    while left:
        kind = left.pop()
        hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
        for field in dataclasses.fields(kind):
            parts = parts_of(hints[field.name])
            if not parts or f"{kind.__name__}.{field.name}" in whole:
                yield kind.__name__, field.name
            else:
                left += [part for part in parts if part not in met]
                met.update(parts)


def row_of_variable(table: list[Row], name: str) -> list[Row]:
    """Rows that say what this environment variable is: those with its name, else those whose patterns fit."""
    environment = [row for row in table if row.of == ENVIRONMENT]
    return [row for row in environment if row.field == name] or [
        row for row in environment if fnmatchcase(name, row.field)
    ]
