"""Parameters of generators as a person writes them: `name:seed=3,requests=1000`.

A generator's parameters are a frozen dataclass of numbers, each made by `number`, so that its bounds stand beside it.
"""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any, TypeVar

from stepwell.errors import ConfigError
from stepwell.simulate.formats import unknown

T = TypeVar("T")


def number(default: int | float, low: float, high: float) -> Any:
    """A field that takes numbers from `low` to `high`; whole ones only if `default` is."""
    return field(default=default, metadata={"low": low, "high": high})


def parsed(kind: type[T], text: str) -> T:
    """An instance of `kind` with the parameters in `text`, `name=value,...`. Raises ConfigError: SW-121 for a name that
    does not exist, SW-122 for a value that cannot be used."""
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, int | float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise unknown("parameter", name, known)
        if name in given:
            raise _not(part, "it is given twice", "give it once")
        given[name] = _value(part, value, known[name])
    return kind(**given)


def _value(part: str, text: str, wanted: Any) -> int | float:
    whole = isinstance(wanted.default, int)
    try:
        value: int | float = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    low, high = wanted.metadata["low"], wanted.metadata["high"]
    if not low <= value <= high:  # not if it is NaN
        noun = "a whole number" if whole else "a number"
        raise _not(
            part, f"{wanted.name} is {noun} from {low:,} to {high:,}", f"for example {wanted.name}={wanted.default}"
        )
    return value


def _not(part: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-122", what=f"the parameter {part[:80]!r} cannot be used", why=why, fix=fix)
