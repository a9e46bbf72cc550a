"""What a person asks of a running well beyond its counts: namespaces, clearing. Answers come when they are known."""

from __future__ import annotations

import logging
from collections.abc import Callable

from stepwell.errors import ProtocolError, Unsupported
from stepwell.hierarchy.clearing import HOST, NamespaceSum, Sum
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.protocol.messages import Clear, Cleared, Message, NamespaceRow, Namespaces, Refused

TAG_BYTES = 16

log = logging.getLogger("stepwell.serve")

Answer = Callable[[Message], None]


def namespaces(hierarchy: Hierarchy, answer: Answer) -> None:
    def counted(sums: dict[bytes, NamespaceSum]) -> None:
        rows = [NamespaceRow(tag, s.tenant, sorted(s.engines), s.blocks, s.nbytes) for tag, s in sums.items()]
        answer(Namespaces(sorted(rows, key=lambda row: -row.nbytes)))

    hierarchy.count_namespaces(counted)


def clear(hierarchy: Hierarchy, message: Clear, answer: Answer) -> None:
    """Raises ProtocolError SW-804 for what no `stepwell clear` sends."""
    tiers = frozenset(message.tiers)
    if not tiers <= {HOST, "disk"} or len(message.namespace) not in (0, TAG_BYTES):
        raise ProtocolError(
            "SW-804",
            what="a Clear that makes no sense",
            why="it names a tier or a namespace that cannot be",
            fix="use the same stepwell version for command and well",
        )
    if message.namespace and tiers != {HOST}:
        error = not_by_namespace()
        answer(Refused(error.code, error.what, error.why, error.fix))
        return

    def cleared(sums: dict[str, Sum]) -> None:
        log.info("cleared: %s", ", ".join(f"{total.blocks} blocks of {tier}" for tier, total in sums.items()))
        answer(Cleared({tier: s.blocks for tier, s in sums.items()}, {tier: s.nbytes for tier, s in sums.items()}))

    hierarchy.clear(tiers, message.namespace, cleared)


def not_by_namespace() -> Unsupported:
    return Unsupported(
        "SW-713",
        what="the disk tier cannot be cleared of one namespace alone",
        why="a segment is deleted as a whole, and namespaces share segments",
        fix="add --tier host (what is on disk can then come back), or clear the whole disk tier",
    )
