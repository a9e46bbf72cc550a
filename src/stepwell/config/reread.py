"""Settings that a running well takes over when it reads them again, and those that need a restart.

Every setting is in one of the two tables; a test checks this.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.config.settings import Settings, texts

LIVE: Mapping[str, str] = {
    "recall": "asked for each request",
    "placement": "asked for each block",
    "write": "asked for each block; blocks that a change from `back` finds unwritten in host memory stay so",
    "prefetch": "guessing starts or stops",
    "pin_waiting": "asked for each pin",
    "linger": "asked when no engine is connected, by a well that an engine has started",
    "linger_empty": "asked when no engine is connected, by a well that an engine has started",
    "log_level": "asked for each line",
}
"""Settings in force at once, each with how."""

FIXED: Mapping[str, str] = {
    "host": "the arena is divided by it",
    "disk": "directories are locked and recovered at the start",
    "disk_reserve": "the sizes of the disk tier are fixed at the start",
    "disk_queue": "it bounds the writes under way",
    "disk_threads": "threads are made at the start",
    "policy": "each policy has learned in a form of its own",
    "seal": "blocks on disk are of one kind for each life of a well",
    "log_format": "a log has lines of one kind for each life of a well",
    "metrics": "the address is taken at the start",
    "socket": "the socket is made at the start",
    "allow_uids": "the modes of the socket follow from it, and connections stay",
    "tenants": "keys, sockets and connections follow from them",
}
"""Settings in force after a restart, each with why."""


def in_force(running: Settings, wanted: Settings) -> Settings:
    """`running`, with the settings of `wanted` that can be taken over."""
    return running.model_copy(update={name: getattr(wanted, name) for name in LIVE})


def changed(before: Settings, now: Settings) -> dict[str, tuple[str, str]]:
    """The settings that differ, each with its old and new value, as a person would write it."""
    old, new = texts(before), texts(now)
    return {name: (old[name], new[name]) for name in new if getattr(before, name) != getattr(now, name)}
