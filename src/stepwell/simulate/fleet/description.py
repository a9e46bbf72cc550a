"""The YAML that describes a fleet, as data: what there is, how fast it is, who decides what, and what fails.

Nothing here runs. `load` reads a file and checks all that can be checked without a trace; `fits` checks the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from stepwell.config import document
from stepwell.config.document import SettingEntry
from stepwell.config.loader import Loaded, merge
from stepwell.config.settings import Duration, Size
from stepwell.errors import ConfigError
from stepwell.policies.costs.hardware import MODELS, preset
from stepwell.policies.costs.prefill import PrefillCost
from stepwell.simulate.fleet.fields import (
    TIERS,
    Bandwidth,
    CostName,
    FailingName,
    FailureName,
    ModeName,
    NamedTiers,
    PolicyName,
    RouteName,
    WriteName,
)
from stepwell.simulate.traces.trace import Trace
from stepwell.units import format_size

MAX_ENGINES = 4096
Seconds = Annotated[float, Field(ge=0, le=1000)]
"""Seconds of a step or a token."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Prefill(_Part):
    """Measured prefill cost of an engine, as in `policies.costs.prefill`. Any field that is set, even to 0, replaces
    the whole preset."""

    step_s: Seconds = 0.0
    token_s: Seconds = 0.0
    pair_s: float = Field(default=0.0, ge=0, le=1)
    step_tokens: int = Field(default=0, ge=0)


class EngineDescription(_Part):
    """One engine. `kv_capacity`: bytes of KV pages, of all its devices. `prefills`: prompts computed at a time, sharing
    the GPU. `link`: largest bandwidth into one GPU, in bytes a second."""

    kv_capacity: Size = 50_000_000_000
    prefix_caching: bool = True
    prefills: int = Field(default=1, ge=1, le=1024)
    link: Bandwidth = 50_000_000_000


class TierDescription(_Part):
    """`capacity` of each host's, or of the one `shared`. `latency` before the first byte of a recall, `parallel`:
    recalls that share `read_bandwidth` at a time; later ones wait. `write_queue`: bytes that may wait to be written;
    unset: as many as it holds. `endurance`: bytes that may be written in its life; or `drive_writes_per_day` of its
    capacity for `warranty_years`."""

    capacity: Size
    read_bandwidth: Bandwidth
    write_bandwidth: Bandwidth
    latency: Duration = 0.0
    parallel: int = Field(default=1, ge=1, le=4096)
    policy: PolicyName = "auto"
    write: WriteName = "through"
    write_queue: Size | None = None
    write_amplification: float = Field(default=1.0, ge=1, le=100, allow_inf_nan=False)
    endurance: Size | None = None
    drive_writes_per_day: float | None = Field(default=None, gt=0, le=1e6)
    warranty_years: float = Field(default=5.0, gt=0, le=100)

    @property
    def endurance_bytes(self) -> float | None:
        if self.drive_writes_per_day is not None:
            return self.drive_writes_per_day * self.capacity * 365 * self.warranty_years
        return self.endurance


class Routing(_Part):
    """`prefix_blocks`: how much of a prompt's beginning prefix_affinity looks at. kv_aware sees what GPUs and the tiers
    of hosts held `stale` ago, and takes `load_weight` tokens off for each token that an engine has yet to compute."""

    by: RouteName = "round_robin"
    prefix_blocks: int = Field(default=4, ge=1, le=1 << 20)
    stale: Duration = 1.0
    load_weight: float = Field(default=1.0, ge=0, le=1e6)


class Failure(_Part):
    """`engine` (numbered through the fleet) or `host`, from 0, restarts at `at` and is back after `down`; or `tier`
    (of all hosts, or of `host`) is `slow` by `factor`, or `gone`, until `until`."""

    what: FailureName
    at: Duration
    engine: int | None = Field(default=None, ge=0)
    host: int | None = Field(default=None, ge=0)
    down: Duration = 0.0
    tier: FailingName | None = None
    until: Duration | None = None
    factor: float = Field(default=10.0, gt=1, le=1e6, allow_inf_nan=False)


class Fleet(_Part):
    """The whole fleet. `speed`: factor by which the trace runs faster than it was recorded."""

    cost: CostName = "llama-3.1-8b@h100"
    prefill: Prefill = Prefill()
    kv_token_bytes: int | None = Field(default=None, ge=1, le=1 << 30)
    hosts: int = Field(default=1, ge=1, le=MAX_ENGINES)
    engines_per_host: int = Field(default=1, ge=1, le=64)
    engine: EngineDescription = EngineDescription()
    tiers: Annotated[dict[str, TierDescription], NamedTiers] = {}
    decide: ModeName = "auto"
    routing: Routing = Routing()
    failures: dict[str, Failure] = {}
    speed: float = Field(default=1.0, ge=1e-6, le=1e6)
    seed: int = 0

    @property
    def engines(self) -> int:
        return self.hosts * self.engines_per_host

    @property
    def prefill_cost(self) -> PrefillCost:
        measured = self.prefill
        if not measured.model_fields_set:
            return preset(self.cost)
        return PrefillCost(measured.step_s, measured.token_s, measured.pair_s, measured.step_tokens)

    @property
    def token_bytes(self) -> int:
        return self.kv_token_bytes or MODELS[self.cost.partition("@")[0]].kv_token_bytes

    def below(self) -> list[tuple[str, TierDescription]]:
        """The tiers that there are, the nearest first."""
        return [(name, self.tiers[name]) for name in TIERS if name in self.tiers]

    def without_tiers(self) -> Fleet:
        """The same engines, routing and restarts, with nothing below the GPUs."""
        kept = {name: failure for name, failure in self.failures.items() if failure.tier is None}
        return self.model_copy(update={"tiers": {}, "failures": kept})


def load(path: Path, settings: Iterable[str] = ()) -> Loaded[Fleet]:
    """The fleet described in the YAML file at `path`; each of `settings`, KEY=VALUE with dotted keys, replaces a value.

    Raises ConfigError: SW-101, SW-102, SW-103, SW-105 as settings of the well do; SW-126 for what cannot be."""
    entries = [*document.read(path), *map(_given, settings)]
    loaded = merge(Fleet, entries)
    _possible(loaded.settings)
    return loaded


def fits(fleet: Fleet, trace: Trace) -> None:
    """Raises ConfigError SW-126 if a place that is described cannot hold a block of the trace."""
    block_bytes = fleet.token_bytes * trace.block_tokens
    places = [(f"tiers.{name}.capacity", tier.capacity) for name, tier in fleet.below()]
    if fleet.engine.prefix_caching:
        places.append(("engine.kv_capacity", fleet.engine.kv_capacity))
    for name, capacity in places:
        if capacity < block_bytes:
            raise _impossible(
                f"{name} is {format_size(capacity)}",
                f"a block of {trace.name} has {trace.block_tokens} tokens, {format_size(block_bytes)}",
                f"set {name} to at least that, or take smaller blocks with --block-tokens",
            )


def _given(text: str) -> SettingEntry:
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise ConfigError(
            "SW-102",
            what=f"--set {text[:80]!r} sets nothing",
            why="it is not KEY=VALUE",
            fix="write, for example, --set tiers.disk.read_bandwidth=7GB",
        )
    return SettingEntry(tuple(key.strip().split(".")), value.strip(), f"--set {key.strip()}")


def _possible(fleet: Fleet) -> None:
    if fleet.engines > MAX_ENGINES:
        raise _impossible(f"{fleet.engines:,} engines", f"at most {MAX_ENGINES:,} are simulated", "describe fewer")
    measured = fleet.prefill
    if measured.model_fields_set and not (measured.token_s or measured.pair_s or measured.step_s):
        raise _impossible("prefill takes no time", "all its terms are 0", "set prefill.token_s, or leave prefill out")
    above = "the GPU" if fleet.engine.prefix_caching else None
    for name, tier in fleet.below():
        if tier.write == "back" and above is None:
            raise _impossible(
                f"tiers.{name}.write is back",
                "nothing above it holds blocks, so nothing would ever be written",
                "set engine.prefix_caching to true, or write to through",
            )
        if tier.endurance is not None and tier.drive_writes_per_day is not None:
            raise _impossible(
                f"tiers.{name} has two endurances", "endurance and drive_writes_per_day say the same", "leave one out"
            )
        above = name
    for name, failure in fleet.failures.items():
        _can_fail(fleet, f"failures.{name}", failure)


def _can_fail(fleet: Fleet, name: str, failure: Failure) -> None:
    needed = {"engine_restart": "engine", "host_restart": "host"}.get(failure.what, "tier")
    if getattr(failure, needed) is None:
        raise _impossible(f"{name} names no {needed}", f"{failure.what} means one", f"set {name}.{needed}")
    for part, most in (("engine", fleet.engines), ("host", fleet.hosts)):
        number = getattr(failure, part)
        if number is not None and number >= most:
            raise _impossible(f"{name}.{part} is {number}", f"they are numbered from 0 to {most - 1}", "correct it")
    if needed != "tier":
        return
    if failure.tier not in fleet.tiers:
        raise _impossible(f"{name}.tier is {failure.tier}", "this fleet has none", "describe it, or leave this out")
    if failure.tier == "shared" and failure.host is not None:
        raise _impossible(f"{name}.host is {failure.host}", "the shared tier is of no host", f"leave {name}.host out")
    if failure.until is None or failure.until <= failure.at:
        raise _impossible(f"{name} has no end", "until is not behind at", f"set {name}.until to a later time")


def _impossible(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-126", what=what, why=why, fix=fix)
