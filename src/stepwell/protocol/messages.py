"""Every message that crosses the socket: those of the modules beside this one, which users import from here.

An engine is one *session*: a scheduler member and one worker member per rank. The scheduler asks, reserves and gives
back; workers copy and acknowledge. Blocks travel as digests (never stored, never logged) and come back as slot
references. Nothing here does I/O.

What an engine may say at a time is bounded: by the decoder where it crosses the socket, and by `overlong` for those
that share a process with the well.
"""

# ruff: noqa: F403, F405 - this module has the names of the others; mypy checks that they are there

from __future__ import annotations

from collections.abc import Iterator

from stepwell.block.facts import MAX_FACTS
from stepwell.protocol.admin import *
from stepwell.protocol.base import *
from stepwell.protocol.hello import *
from stepwell.protocol.limits import *
from stepwell.protocol.scheduler import *
from stepwell.protocol.well import *
from stepwell.protocol.worker import *

FromEngine = (
    Hello
    | Ask
    | Look
    | Recall
    | Release
    | Reserve
    | Abandon
    | Forget
    | Canary
    | Report
    | Timings
    | Mapped
    | Unmapped
    | Filled
    | BlocksCopied
    | Recalled
    | Ping
    | StatsQuery
    | NamespacesQuery
    | Clear
    | DecisionsQuery
    | Pause
    | Resume
    | PausedQuery
    | Reload
    | Stop
)
FromWell = (
    Welcome
    | Refused
    | Ready
    | Found
    | Seen
    | Landed
    | LineMoved
    | GiveWay
    | Granted
    | SlabShared
    | SlabRetired
    | Pong
    | Stats
    | Namespaces
    | Cleared
    | Decisions
    | Paused
    | Reloaded
    | Stopping
)


def overlong(message: FromEngine) -> bool:
    """No engine has so much to say at a time."""
    match message:
        case Hello(facts=facts, groups=groups, flags=flags):
            return len(facts) > MAX_FACTS or len(groups) > MAX_GROUPS or len(flags) > MAX_FLAGS
        case Filled(leases=leases, dropped=dropped):
            return max(len(leases), len(dropped)) > MAX_LISTED
        case Abandon(leases=numbers) | Recalled(transfers=numbers):
            return len(numbers) > MAX_LISTED
        case Ask(digests=digests) | Look(digests=digests) | Forget(digests=digests):
            return len(digests) > 32 * MAX_DIGESTS
        case Recall(no_place=NoPlace(missing=missing)) | Release(no_place=NoPlace(missing=missing)):
            return len(missing) > MAX_GROUPS
        case Report(counts=counts):
            return len(counts) > MAX_COUNTS
        case Timings(steps=steps, copies=copies):
            return max(len(steps), len(copies)) > MAX_TIMINGS
        case _:
            return False


def pieces(message: FromEngine) -> Iterator[FromEngine]:
    """The message, or several that say the same, each of a list that is short."""
    match message:
        case Filled(leases=leases, dropped=dropped) if len(leases) + len(dropped) > PIECE:
            yield from (Filled([], some) for some in _cut(dropped))  # first: what is dropped is not written
            yield from (Filled(some, []) for some in _cut(leases))
        case Abandon(leases=leases) if len(leases) > PIECE:
            yield from map(Abandon, _cut(leases))
        case Recalled(transfers=transfers) if len(transfers) > PIECE:
            yield from map(Recalled, _cut(transfers))
        case _:
            yield message


def _cut(numbers: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(numbers), PIECE):
        yield numbers[at : at + PIECE]
