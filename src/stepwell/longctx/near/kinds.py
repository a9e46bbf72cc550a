"""Kinds of key indexes as words, to be made in another process: data and a name, never code."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import msgspec

from stepwell.errors import ConfigError
from stepwell.longctx.parts.index.base import IndexKind

Plain = bool | int | float | str | None


class KindDescription(msgspec.Struct, frozen=True):
    """A dataclass: where it is imported from, and its fields."""

    module: str
    name: str
    fields: dict[str, Plain]


def describe(kind: IndexKind) -> KindDescription:
    """Raises ConfigError SW-129 for a kind that another process cannot make: it must be a dataclass with numbers and
    texts for fields, at the top of a module that can be imported."""
    of = type(kind)
    if not dataclasses.is_dataclass(kind) or of.__module__ == "__main__" or "." in of.__qualname__:
        raise _impossible(of, "it is no dataclass at the top of a module that can be imported")
    fields = {each.name: getattr(kind, each.name) for each in dataclasses.fields(kind) if each.init}
    if not all(isinstance(value, Plain) for value in fields.values()):
        raise _impossible(of, "its fields are not all numbers and texts")
    return KindDescription(of.__module__, of.__qualname__, fields)


def build(kind: KindDescription) -> IndexKind:
    made: IndexKind = getattr(import_module(kind.module), kind.name)(**kind.fields)
    return made


def _impossible(of: type, why: str) -> ConfigError:
    return ConfigError(
        "SW-129",
        what=f"the index {of.__qualname__} cannot score near the data",
        why=why,
        fix="use an index of stepwell.longctx.parts, write yours in this way, or use executor='fetch'",
    )
