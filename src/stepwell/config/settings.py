"""The settings of a well, their defaults and their limits.

Pure data: nothing here reads files, the environment or the machine; `loader` fills it and the well uses it. Not
imported by the engine side, which passes settings on as text to the well that it starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from stepwell.errors import ConfigError
from stepwell.units import format_size, parse_duration, parse_size

Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]

MIN_HOST_BYTES = 64 << 20
_MAX_UID = (1 << 32) - 2  # the last number means "no user" to the system


def _listed(value: object) -> object:
    """A list may be written as one text: "1000,1001"."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _absolute(path: Path | None) -> Path | None:
    if path is not None and not path.is_absolute():
        raise ConfigError(
            "SW-102",
            what=f"{path} is not an absolute path",
            why="well and engines may run in different directories and would not mean the same socket",
            fix="write the whole path, such as /run/stepwell/well.sock",
        )
    return path


SocketPath = Annotated[Path | None, AfterValidator(_absolute)]
Uid = Annotated[int, Field(ge=0, le=_MAX_UID)]
Uids = Annotated[tuple[Uid, ...], BeforeValidator(_listed), Field(max_length=64)]


class Settings(BaseModel):
    """Settings of one well. Sizes in bytes, durations in seconds, shares from 0 (excluded) to 1 of the arena."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Size | None = Field(default=None, description="size of the host arena; unset: a quarter of the free memory")
    linger: Duration = Field(default=600.0, description="how long a well that holds blocks stays without engines")
    linger_empty: Duration = Field(default=60.0, description="how long an empty well stays without engines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")
    pin_waiting: Share = Field(default=0.25, description="share that waiting requests together may pin")
    pin_request: Share = Field(default=0.5, description="share that one request alone may pin")
    socket: SocketPath = Field(default=None, description="where the well listens; unset: found by home")
    allow_uids: Uids = Field(default=(), description="users beside the well's own whose engines may connect")


def check_sizes(settings: Settings, allowed_bytes: int, *, minimum: int = MIN_HOST_BYTES) -> None:
    """Raise ConfigError if `settings.host` cannot work on this machine; an unset host is not checked.

    `allowed_bytes` is what the memory cgroups and the machine still allow (`stepwell.io.host.memory_allowed`). SW-106
    if host is above it: the kernel would kill the well or the engine. SW-107 if host is below `minimum`.
    """
    if settings.host is None:
        return
    if settings.host > allowed_bytes:
        raise ConfigError(
            "SW-106",
            what=f"host is {format_size(settings.host)}, but only {format_size(allowed_bytes)} can be used",
            why="the memory cgroup of this process or the machine allows no more, and the kernel kills what exceeds it",
            fix=f"set host to at most {allowed_bytes >> 20}MiB, or raise the memory limit of the container or service",
        )
    if settings.host < minimum:
        raise ConfigError(
            "SW-107",
            what=f"host is {format_size(settings.host)}",
            why="the arena is made of slabs of several slots each and is of no use below that",
            fix=f"set host to at least {format_size(minimum)}",
        )
