"""The settings of a well, their defaults and their limits.

Pure data: nothing here reads files, the environment or the machine; `loader` fills it and the well uses it. Not
imported by the engine side, which passes settings on as text to the well that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from stepwell.config.access import SocketPath, Tenants, Uids, check_access
from stepwell.config.listen import parse_listen
from stepwell.config.places import DiskPlace, parse_places
from stepwell.errors import ConfigError
from stepwell.units import Amount, format_duration, format_size, parse_amount, parse_duration, parse_size


def _seconds(value: float) -> str:
    short = format_duration(value)
    return short if parse_duration(short) == value else f"{value!r}s"


def _kind(name: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "format": name})


# How a value is read, how it is written (in JSON and for people), and what its kind is called in the documentation.
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(lambda size: str(Amount(size=size)), str, when_used="json"),
    _kind("size"),
]
SizeOrPercent = Annotated[Amount, BeforeValidator(parse_amount), PlainSerializer(str, str), _kind("size or per cent")]
Duration = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(_seconds, str, when_used="json"), _kind("duration")
]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Places = Annotated[
    tuple[DiskPlace, ...],
    BeforeValidator(parse_places),
    PlainSerializer(lambda places: [str(place) for place in places], list[str]),
    _kind("list of PATH:SIZE"),
]
Listen = Annotated[str, BeforeValidator(parse_listen), _kind("address or path")]

MIN_HOST_BYTES = 64 << 20
MAX_DEFAULT_QUEUE_BYTES = 1 << 30


class Settings(BaseModel):
    """Settings of one well. Sizes in bytes, durations in seconds, shares from 0 (excluded) to 1 of the arena."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: SizeOrPercent | None = Field(
        default=None,
        description="size of the host arena, or a per cent of the memory that the control groups and the machine still"
        " allow when the well starts; unset: a quarter of it, at most 16GiB",
    )
    disk: Places = Field(
        default=(),
        description="directories of the disk tier, each as PATH:SIZE or PATH (then 50%); the size may be a per cent of"
        " the filesystem; a list, or one text with commas between; none: no disk tier",
    )
    disk_reserve: SizeOrPercent = Field(
        default=Amount(percent=Decimal(5)),
        description="free space of each directory's filesystem that is left to others at all times, as a size or a per"
        " cent of the filesystem",
    )
    disk_queue: Size | None = Field(
        default=None, description="bytes that may wait to be written to disk; unset: an eighth of host, at most 1GiB"
    )
    disk_threads: int = Field(
        default=4, ge=1, le=64, description="threads per directory that read, and as many that write"
    )
    recall: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="whether what is cached is recalled: where that is expected to be faster than computing it (auto),"
        " always, or never",
    )
    policy: Literal["auto", "lru", "lfu", "arc", "s3fifo", "sieve", "lru2", "second_touch", "gdsf"] = Field(
        default="auto",
        description="which blocks host memory keeps when it is full, and which it lets in; auto: those expected to"
        " save most; docs/policies.md has them all, measured",
    )
    placement: Literal["by_worth", "hot", "warm"] = Field(
        default="by_worth",
        description="where a block lies: by_worth: in host memory if the policy lets it in there, else only on disk, or"
        " nowhere without one; hot: always in host memory, too; warm: only on disk, if there is one",
    )
    write: Literal["through", "back", "second_touch"] = Field(
        default="through",
        description="when blocks are written to disk: as soon as they are spilled; back: shortly before host memory"
        " forgets them, and the rest when the well ends, so that a kill loses what was not written; second_touch: when"
        " they are asked for a second time, so that prompts that never come back wear no device",
    )
    prefetch: Literal["on", "off"] = Field(
        default="off",
        description="whether blocks on disk of a conversation that goes on at regular times are promoted into host"
        " memory shortly before its next turn is expected",
    )
    seal: Literal["aes-256-gcm", "plain"] = Field(
        default="aes-256-gcm", description="how blocks lie on disk: encrypted and authenticated, or with checksums only"
    )
    linger: Duration = Field(default=600.0, description="how long a well that holds blocks stays without engines")
    linger_empty: Duration = Field(default=60.0, description="how long an empty well stays without engines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")
    log_format: Literal["text", "json"] = Field(
        default="text", description="lines for people, or one JSON object a line"
    )
    metrics: Listen | None = Field(
        default=None,
        description="where the well serves /metrics: 127.0.0.1:PORT, [::1]:PORT, localhost:PORT, or the absolute path"
        " of a Unix socket; unset: nowhere",
    )
    pin_waiting: Share = Field(default=0.5, description="share of the arena that waiting requests together may pin")
    socket: SocketPath | None = Field(
        default=None,
        description="where the well listens, for engines that name this socket and never start it; its directory must"
        " belong to the well's user; unset: where engines with the same home look for it",
    )
    allow_uids: Uids = Field(
        default=(),
        description="users beside the well's own whose engines may connect; needs socket, which is then open to its"
        " group; all of them form one trust domain; none: the well's own user and root",
    )
    tenants: Tenants = Field(
        default={},
        description="trust domains beside that of the well's own user, each with keys, memory and blocks of its own;"
        " `uids` are its users, `socket` is where it alone is met: its users and the well's own user there are of this"
        " tenant; without `socket` its users are recognised at the well's",
    )


def check_host(host: int, allowed_bytes: int, *, minimum: int = MIN_HOST_BYTES) -> None:
    """Raise ConfigError if an arena of `host` bytes cannot work on this machine.

    `allowed_bytes` is what the memory cgroups and the machine still allow (`stepwell.io.host.memory_allowed`). SW-106
    if host is above it: the kernel would kill the well or the engine. SW-107 if host is below `minimum`.
    """
    if host > allowed_bytes:
        raise ConfigError(
            "SW-106",
            what=f"host is {format_size(host)}, but only {format_size(allowed_bytes)} can be used",
            why="the memory cgroup of this process or the machine allows no more, and the kernel kills what exceeds it",
            fix=f"set host to at most {allowed_bytes >> 20}MiB, or raise the memory limit of the container or service",
        )
    if host < minimum:
        raise ConfigError(
            "SW-107",
            what=f"host is {format_size(host)}",
            why="the arena is made of slabs of several slots each and is of no use below that",
            fix=f"set host to at least {format_size(minimum)}",
        )


def check_together(settings: Settings) -> None:
    """Raise ConfigError if settings, each of them right, contradict each other on any machine: SW-102, or SW-114 for
    the sizes of the disk tier."""
    check_access(settings.socket, settings.allow_uids, settings.tenants, settings.metrics)
    reserve = settings.disk_reserve.percent or Decimal(0)
    for place in settings.disk:
        if reserve == 100 or reserve + (place.size.percent or 0) > 100:
            most = f", or the size to at most {Amount(percent=100 - reserve)}" if reserve < 100 else ""
            raise ConfigError(
                "SW-114",
                what=f"the disk tier cannot have {place}",
                why=f"disk_reserve leaves {settings.disk_reserve} of the filesystem to others",
                fix=f"lower disk_reserve (5% unless it is set){most}",
            )


def queue_bytes(settings: Settings, host: int) -> int:
    """Bytes that may wait to be written to disk, beside an arena of `host` bytes."""
    if settings.disk_queue is not None:
        return settings.disk_queue
    return min(host // 8, MAX_DEFAULT_QUEUE_BYTES)


def allowed(schema: Mapping[str, Any]) -> str:
    """Allowed values of a setting, from its part of the JSON schema: "whole number from 1 to 64". Empty if the schema
    does not define them."""
    match next((part for part in schema.get("anyOf", ()) if part.get("type") != "null"), schema):
        case {"enum": values}:
            return "one of " + ", ".join(f"`{value}`" for value in values)
        case {"format": kind}:
            return str(kind)
        case {"type": "integer", "minimum": least, "maximum": most}:
            return f"whole number from {least} to {most}"
        case {"type": "number", "exclusiveMinimum": least, "maximum": most}:
            return f"number over {least} and at most {most}"
    return ""


def texts(settings: Settings) -> dict[str, str]:
    """Each setting's value as a person would write it; "unset" and "none" where there is none."""
    return {name: _text(value) for name, value in settings.model_dump(mode="json").items()}


def _text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_members(of)}" for name, of in value.items()) or "none"
    return ",".join(value) or "none" if isinstance(value, list) else str(value)


def _members(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in values.items() if value)
