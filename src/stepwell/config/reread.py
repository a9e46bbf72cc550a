"""Which settings a running well takes over when it reads them again, and which only when it is started again.

All of them are in one of the two, by name: a test says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.config.settings import Settings, texts

LIVE: Mapping[str, str] = {
    "recall": "asked for each request",
    "placement": "asked for each block",
    "write": "asked for each block; what a change from `back` finds unwritten in host memory stays so",
    "prefetch": "guesses begin, or begin no more",
    "pin_waiting": "asked for each pin",
    "linger": "asked when nobody is connected, by a well that an engine has started",
    "linger_empty": "asked when nobody is connected, by a well that an engine has started",
    "log_level": "asked for each line",
}
"""In force at once, with how."""

FIXED: Mapping[str, str] = {
    "host": "the arena is divided by it",
    "disk": "directories are locked and recovered at the start",
    "disk_reserve": "the sizes of the disk tier are fixed at the start",
    "disk_queue": "a bound of what may be under way",
    "disk_threads": "threads are made at the start",
    "policy": "it has learned from what it has seen, in a form of its own",
    "seal": "what lies on disk is to be of one kind for each life of a well",
    "log_format": "a log is to have lines of one kind for each life of a well",
    "metrics": "the address is taken at the start",
    "socket": "the socket is made at the start",
    "allow_uids": "who may connect decides modes of the socket, and who is connected stays",
    "tenants": "keys, sockets and who is connected follow from them",
}
"""In force when the well is started again, with why."""


def in_force(running: Settings, wanted: Settings) -> Settings:
    """`running` with what can be taken over of `wanted`."""
    return running.model_copy(update={name: getattr(wanted, name) for name in LIVE})


def changed(before: Settings, now: Settings) -> dict[str, tuple[str, str]]:
    """The settings that differ, each with what it was and what it is, as a person would write it."""
    old, new = texts(before), texts(now)
    return {name: (old[name], new[name]) for name in new if getattr(before, name) != getattr(now, name)}
