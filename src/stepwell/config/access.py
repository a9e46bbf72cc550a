"""Access to a well: users, sockets, and the tenants that follow from them.

Pure data, as the other settings are. A connection's tenant follows from the user of its process or from the socket it
came in by, never from its messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.errors import ConfigError

MAX_TENANTS = 64
_MAX_UID = (1 << 32) - 2  # the last number means "no user" to the system
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)


def _listed(value: object) -> object:
    """A list may be written as one text: "1000,1001"."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _absolute(path: Path) -> Path:
    if path.is_absolute() and "\0" not in str(path):
        return path
    raise ConfigError(
        "SW-102",
        what=f"{str(path)[:200]!r} is not an absolute path",
        why="well and engines may run in different directories and would not mean the same socket",
        fix="write the whole path, such as /run/stepwell/well.sock",
    )


def _named(tenants: dict[str, Tenant]) -> dict[str, Tenant]:
    for name in tenants:
        if not _NAME.fullmatch(name) or name == DEFAULT_TENANT:
            raise ConfigError(
                "SW-102",
                what=f"{name[:40]!r} cannot name a tenant",
                why=f"a name has 1 to 32 of a-z, 0-9, _ and -; {DEFAULT_TENANT!r} is that of the well's own user",
                fix="choose another name",
            )
    return tenants


SocketPath = Annotated[
    Path,
    AfterValidator(_absolute),
    PlainSerializer(str, str),
    WithJsonSchema({"type": "string", "format": "absolute path"}),
]
Uid = Annotated[int, Field(ge=0, le=_MAX_UID)]
Uids = Annotated[
    tuple[Uid, ...],
    BeforeValidator(_listed),
    Field(max_length=64),
    PlainSerializer(lambda uids: [str(uid) for uid in uids], list[str]),
    WithJsonSchema({"type": "string", "format": "list of user numbers"}),
]


class Tenant(BaseModel):
    """`uids`: users whose engines are this tenant's: at its own socket, or without one at the well's. `socket`: where
    it alone is met; the well's own user and root may use it too, and are this tenant's there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uids: Uids = ()
    socket: SocketPath | None = None


Tenants = Annotated[
    dict[str, Tenant],
    Field(max_length=MAX_TENANTS),
    AfterValidator(_named),
    WithJsonSchema({"type": "object", "format": "NAME: {uids: [...], socket: PATH}, either or both, for each"}),
]


def check_access(
    socket: Path | None, allow_uids: tuple[int, ...], tenants: Mapping[str, Tenant], metrics: str | None = None
) -> None:
    """Raises ConfigError SW-102 if these settings contradict each other on any machine: users that cannot connect, and
    users or sockets that would have two tenants."""
    if allow_uids and socket is None:
        raise _closed("allow_uids", allow_uids)
    users: dict[int, str] = dict.fromkeys(allow_uids, "allow_uids")
    places: dict[str, str] = {}
    for setting, path in _places(socket, tenants, metrics):
        if (other := places.setdefault(os.path.normpath(path), setting)) != setting:
            raise _twice(f"{other} and {setting} are both {path}", "give each a path of its own")
    for name, tenant in tenants.items():
        setting = f"tenants.{name}.uids"
        if tenant.socket is not None:
            continue
        if not tenant.uids:
            raise ConfigError(
                "SW-102",
                what=f"the tenant {name} has neither users nor a socket",
                why="no connection could be of it",
                fix=f"set {setting}, tenants.{name}.socket, or remove it",
            )
        if socket is None:
            raise _closed(setting, tenant.uids)
        for uid in tenant.uids:
            if (other := users.setdefault(uid, setting)) != setting:
                raise _twice(f"user {uid} is in {other} and in {setting}", "a user has one tenant at one socket")


def _places(socket: Path | None, tenants: Mapping[str, Tenant], metrics: str | None) -> Iterator[tuple[str, str]]:
    sockets = [("socket", socket), *((f"tenants.{name}.socket", tenant.socket) for name, tenant in tenants.items())]
    for setting, path in sockets:
        if path is not None:
            yield setting, str(path)
            yield f"the lock of {setting}", f"{path}.lock"
    if metrics is not None and metrics.startswith("/"):
        yield "metrics", metrics


def _closed(setting: str, uids: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        "SW-102",
        what=f"{setting} = {','.join(map(str, uids))} has no effect",
        why="without `socket` the well listens in a directory that only its own user may enter",
        fix=f"set socket too, such as /run/stepwell/well.sock, or remove {setting}",
    )


def _twice(what: str, fix: str) -> ConfigError:
    return ConfigError("SW-102", what=what, why="a connection there would have two tenants", fix=fix)
