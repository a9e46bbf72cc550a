"""An operator's requests to a running well: namespaces, decisions, clearing, pauses, reload, stop. Some are answered
later, when the answer is known."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from stepwell.errors import ProtocolError
from stepwell.events import Expected, RecallDecided, RecallEnded
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.pauses import one_line
from stepwell.hierarchy.requests.clearing import NamespaceSum, Sum
from stepwell.hierarchy.saved import KINDS, Kind, PauseRecord
from stepwell.protocol.messages import (
    Clear,
    Cleared,
    DecisionRow,
    Decisions,
    DecisionsQuery,
    Message,
    NamespaceRow,
    Namespaces,
    NamespacesQuery,
    Paused,
    PausedQuery,
    PauseRow,
    PlaceRow,
    Reload,
    Stop,
    Stopping,
)
from stepwell.protocol.messages import Pause as PauseMessage
from stepwell.protocol.messages import Resume as ResumeMessage
from stepwell.serve.server.connection import Connection

TAG_BYTES = 16

MAX_ASKING = 32
"""Connections of one user's commands at a time: the one that has said nothing for longest makes room, so that no number
of forgotten ones keeps an operator out."""

log = logging.getLogger("stepwell.serve")

Answer = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Shell:
    """The process around a hierarchy, as an operator's requests need it. `kept`: pauses are saved and outlive the well.
    `reload` has the settings read again and calls its argument with the answer. `keep_time` is to be called at
    `next_moment`."""

    kept: Callable[[], bool]
    reload: Callable[[Answer], None]
    keep_time: Callable[[float], None] = lambda now: None
    next_moment: Callable[[], float | None] = lambda: None


class Commands:
    """Connections of people's commands."""

    def __init__(self) -> None:
        self._all: dict[Connection, None] = {}  # the one that spoke last is the last

    def add(self, connection: Connection) -> list[Connection]:
        """Adds it, and returns those that make room for it."""
        self._all[connection] = None
        same = [each for each in self._all if each.uid == connection.uid]
        idle = same[: max(0, len(same) - MAX_ASKING)]
        for each in idle:
            del self._all[each]
        return idle

    def spoke(self, connection: Connection) -> None:
        if connection in self._all:
            self._all[connection] = self._all.pop(connection)

    def discard(self, connection: Connection) -> None:
        self._all.pop(connection, None)


def handle(
    hierarchy: Hierarchy, shell: Shell, message: Message, uid: int, answer: Answer, stop: Callable[[str], None]
) -> bool:
    """Does what the operator `uid` asks. False: the message is not an operator's."""
    match message:
        case NamespacesQuery():
            namespaces(hierarchy, answer)
        case DecisionsQuery():
            decisions(hierarchy, message, answer)
        case Clear():
            clear(hierarchy, message, answer)
        case PauseMessage():
            pause(hierarchy, message, uid, shell.kept, answer)
        case ResumeMessage():
            resume(hierarchy, message, uid, shell.kept, answer)
        case PausedQuery():
            paused(hierarchy, shell.kept, answer)
        case Reload():
            shell.reload(answer)
        case Stop():
            answer(Stopping())
            stop("it was asked to")
        case _:
            return False
    return True


def namespaces(hierarchy: Hierarchy, answer: Answer) -> None:
    def counted(sums: dict[bytes, NamespaceSum]) -> None:
        rows = [
            NamespaceRow(
                tag,
                s.tenant,
                sorted(s.engines),
                s.blocks,
                s.nbytes,
                s.quarantined,
                s.nearest,
                s.differs,
                s.groups,
                s.shards,
            )
            for tag, s in sums.items()
        ]
        answer(Namespaces(sorted(rows, key=lambda row: -row.nbytes)))

    hierarchy.operator.count_namespaces(counted)


def decisions(hierarchy: Hierarchy, message: DecisionsQuery, answer: Answer) -> None:
    answer(Decisions([_row(*pair) for pair in hierarchy.decisions.latest(message.most)]))


def _row(decided: RecallDecided, ended: RecallEnded | None) -> DecisionRow:
    d = decided
    (recall_s, rest_s), (whole_s, whole_rest_s) = _seconds(d.chosen), _seconds(d.whole)
    row = DecisionRow(
        d.number, d.at_s, d.tokens, d.block_tokens, dict(d.blocks), dict(d.queued), d.recall, d.why, d.limit_s, d.doubt,
        d.busy_s,
        recall_s, rest_s, whole_s, whole_rest_s, d.none_s,
        prefix=d.prefix,
    )  # fmt: skip
    if ended is None:
        return row
    n = ended.no_place
    return msgspec.structs.replace(
        row, ended=True, recalled=ended.recalled, waited_s=ended.waited_s, read_s=ended.read_s, gave_up=ended.gave_up,
        regret_s=ended.regret_s,
        no_place=PlaceRow(n.blocks, n.places, n.tried, list(n.missing)) if n is not None else None,
    )  # fmt: skip


def _seconds(expected: Expected | None) -> tuple[float | None, float | None]:
    return (expected.recall_s, expected.rest_s) if expected is not None else (None, None)


def clear(hierarchy: Hierarchy, message: Clear, answer: Answer) -> None:
    """Raises ProtocolError SW-804 for what no `stepwell cache clear` sends."""
    tiers = frozenset(message.tiers) & frozenset(
        hierarchy.tiers
    )  # commands of older versions name tiers that may not exist
    if not tiers or len(message.namespace) not in (0, TAG_BYTES):
        raise ProtocolError(
            "SW-804",
            what="a Clear that makes no sense",
            why="it names a tier or a namespace that cannot be",
            fix="use the same stepwell version for command and well",
        )

    def cleared(sums: dict[str, Sum]) -> None:
        log.info("cleared: %s", ", ".join(f"{total.blocks} blocks of {tier}" for tier, total in sums.items()))
        answer(
            Cleared(
                {tier: total.blocks for tier, total in sums.items()},
                {tier: total.nbytes for tier, total in sums.items()},
                [tier for tier, total in sums.items() if not total.whole],
            )
        )

    hierarchy.operator.clear(tiers, message.namespace, cleared)


def pause(hierarchy: Hierarchy, message: PauseMessage, uid: int, kept: Callable[[], bool], answer: Answer) -> None:
    """Raises ProtocolError SW-804 for what no `stepwell pause` sends."""
    for kind in _kinds(message.kinds):
        hierarchy.operator.pause(PauseRecord(kind, time.time(), uid, one_line(message.reason)))
    paused(hierarchy, kept, answer)


def resume(hierarchy: Hierarchy, message: ResumeMessage, uid: int, kept: Callable[[], bool], answer: Answer) -> None:
    """Raises ProtocolError SW-804 for what no `stepwell resume` sends."""
    for kind in _kinds(message.kinds):
        hierarchy.operator.resume(kind, uid)
    paused(hierarchy, kept, answer)


def paused(hierarchy: Hierarchy, kept: Callable[[], bool], answer: Answer) -> None:
    answer(Paused([PauseRow(p.kind, p.since, p.uid, p.reason) for p in hierarchy.pauses.all], kept()))


def _kinds(named: list[str]) -> list[Kind]:
    kinds = [kind for kind in KINDS if kind in named]
    if not kinds or not set(named) <= set(KINDS):
        raise ProtocolError(
            "SW-804",
            what="a pause that makes no sense",
            why="it names something that cannot be paused, or nothing",
            fix="use the same stepwell version for command and well",
        )
    return kinds
