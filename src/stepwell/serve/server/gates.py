"""The sockets that a well listens at, and whose a connection is that comes in by one.

A connection's tenant follows from the socket and from the user that the kernel names, never from what it says. The
well's operator is its own user, or root, at the main gate. At a tenant's own socket all users are that tenant: a
container that is given only this socket can ask for nothing of another tenant.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.config import Settings
from stepwell.errors import AccessDenied, ConfigError

_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Gate:
    """One listening socket. `tenants`: the tenant of each user who may connect. `operators`: users who may change the
    well as well."""

    listener: socket.socket
    tenants: Mapping[int, str]
    operators: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GatePlan:
    """A gate before it is open: its path and its users. `shared`: the socket's group may connect, too."""

    path: Path
    tenants: Mapping[int, str]
    operators: frozenset[int] = frozenset()
    shared: bool = field(default=False)


def gate_plans(settings: Settings, main: Path, uid: int) -> list[GatePlan]:
    """The main plan in, at `main`, and that of each tenant with a socket of its own. `uid` runs the well.

    Raises ConfigError SW-102 if that user is listed as another tenant's at the main gate.
    """
    ours = frozenset((uid, 0))  # root could change anything anyway
    guests = dict.fromkeys(settings.allow_uids, DEFAULT_TENANT)
    apart: list[GatePlan] = []
    for name, tenant in settings.tenants.items():
        users = dict.fromkeys(tenant.uids, name)
        if tenant.socket is not None:
            apart.append(GatePlan(tenant.socket, dict.fromkeys(ours, name) | users, shared=bool(users)))
            continue
        if uid in users:
            raise ConfigError(
                "SW-102",
                what=f"user {uid} runs this well and is in tenants.{name}.uids",
                why="at the well's own socket its own user is its operator, with a tenant of its own",
                fix=f"run the well as another user, or give the tenant {name} a socket of its own",
            )
        guests |= users
    return [GatePlan(main, dict.fromkeys(ours, DEFAULT_TENANT) | guests, ours, bool(guests)), *apart]


@contextlib.contextmanager
def opened(plan: GatePlan) -> Iterator[Gate]:
    """The gate, listening. A file at its path is replaced: the caller holds its lock, so no process uses it. Raises
    AccessDenied SW-604 if the socket cannot be made."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117 if plan.shared else 0o177)
    try:
        plan.path.unlink(missing_ok=True)
        listener.bind(str(plan.path))
    except OSError as error:
        listener.close()
        raise AccessDenied(
            "SW-604",
            what=f"the socket {plan.path} cannot be made",
            why=error.strerror or str(error),
            fix="remove what is in its place, or set XDG_RUNTIME_DIR to a directory of your own",
        ) from error
    finally:
        os.umask(before)
    try:
        listener.listen(_BACKLOG)
        yield Gate(listener, plan.tenants, plan.operators)
    finally:
        with contextlib.suppress(OSError):  # the next well replaces it
            plan.path.unlink(missing_ok=True)  # first, so that no client connects to a closed listener
        listener.close()
