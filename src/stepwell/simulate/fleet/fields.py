"""Values of a fleet's description: bandwidths, and names that must be known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

from stepwell.errors import ConfigError
from stepwell.policies.catalog import POLICIES
from stepwell.policies.costs.hardware import preset
from stepwell.policies.decide import RecallMode
from stepwell.policies.writing.named import WRITE_POLICIES
from stepwell.units import parse_size

TIERS: Final = ("host", "disk", "shared")
"""Tiers below the GPU, the nearest first. `host` and `disk` are each host's own."""

ROUTES: Final = ("random", "round_robin", "prefix_affinity", "kv_aware")
WRITES: Final = tuple(WRITE_POLICIES)
FAILURES: Final = ("engine_restart", "host_restart", "slow", "gone")


def unknown(kind: str, name: object, names: Iterable[str]) -> ConfigError:
    """The error SW-102, with the name that is nearest."""
    known = ", ".join(names)
    near = difflib.get_close_matches(str(name), known.split(", "), 1)
    return ConfigError(
        "SW-102",
        what=f"there is no {kind} {str(name)[:80]!r}",
        why="only known names are read",
        fix=f"{f'did you mean {near[0]}? ' if near else ''}Known are {known}",
    )


def _one_of(kind: str, names: Iterable[str]) -> BeforeValidator:
    known = tuple(names)

    def check(value: object) -> object:
        if value in known:
            return value
        raise unknown(kind, value, known)

    return BeforeValidator(check)


def _tiers(value: object) -> object:
    for name in value if isinstance(value, dict) else ():
        if name not in TIERS:
            raise unknown("tier", name, TIERS)
    return value


def _preset(name: str) -> str:
    preset(name)
    return name


def _bandwidth(value: str | int) -> int:
    try:
        return parse_size(value.strip().removesuffix("/s") if isinstance(value, str) else value)
    except ConfigError:
        raise ConfigError(
            "SW-102",
            what=f"{str(value)[:80]!r} is not a bandwidth",
            why="its form, unit or range is not accepted",
            fix="write bytes a second, more than none: for example 7GB/s or 500MiB",
        ) from None


Bandwidth = Annotated[int, BeforeValidator(_bandwidth)]
"""Bytes a second: 7GB or 7GB/s."""

CostName = Annotated[str, AfterValidator(_preset)]
PolicyName = Annotated[str, _one_of("policy", POLICIES)]
RouteName = Annotated[str, _one_of("routing", ROUTES)]
WriteName = Annotated[str, _one_of("write policy", WRITES)]
ModeName = Annotated[str, _one_of("mode of deciding", [mode.value for mode in RecallMode])]
FailureName = Annotated[str, _one_of("failure", FAILURES)]
NamedTiers = BeforeValidator(_tiers)
"""Keys of a mapping."""

FailingName = Annotated[str, _one_of("tier that is slow or gone", TIERS[1:])]
