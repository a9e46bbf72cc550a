"""Arguments of the command line: policies by name, capacities in tokens or as a share of the working set."""

from __future__ import annotations

import difflib
import re

from stepwell import renamed
from stepwell.errors import ConfigError
from stepwell.simulate.point import NAMES
from stepwell.simulate.sweep import SweepCapacity

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg%]?)", re.IGNORECASE)


def policies(text: str) -> list[str]:
    """Names, separated by commas, each once. Raises ConfigError SW-124."""
    given = (name.strip().lower() for name in text.split(","))
    names = list(dict.fromkeys(renamed.value("policy", name) for name in given if name))
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            raise ConfigError(
                "SW-124",
                what=f"there is no policy {name[:80]!r}",
                why="the policies are " + ", ".join(NAMES),
                fix=f"did you mean {near[0]}?" if near else "name one of them",
            )
    if not names:
        raise ConfigError(
            "SW-124", what="no policy is named", why="there is nothing to replay", fix="name one, or more"
        )
    return names


def capacities(text: str) -> list[SweepCapacity]:
    """Tokens (`500000`, `1.5M`) or shares of the working set (`5%`), separated by commas. Raises ConfigError SW-125."""
    found = [_capacity(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise _unusable(text, "none is named")
    return list(dict.fromkeys(found))


def _capacity(text: str) -> SweepCapacity:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise _unusable(text, "it is no number of tokens and no share")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise _unusable(text, "it is not over 0 and at most 100 %")
        return SweepCapacity(share=number / 100)
    tokens = number * _UNITS[unit]
    if not 1 <= tokens <= 1e15:
        raise _unusable(text, "it is not from 1 to 10^15 tokens")
    return SweepCapacity(int(tokens))


def _unusable(text: str, why: str) -> ConfigError:
    return ConfigError(
        "SW-125",
        what=f"a capacity of {text[:80]!r} cannot be used",
        why=why,
        fix="name tokens, as 500000 or 1.5M, or a share of the working set, as 5%",
    )
