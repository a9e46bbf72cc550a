"""What is known of namespaces' identities beyond their digests: facts of live engines and of those before them.

For people alone: it names what differs where an engine does not find what others have stored. Kept by tenant, since
none may learn of another's, and compared only within one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stepwell.block.facts import differences, facts_of, facts_text
from stepwell.errors import AccessDenied
from stepwell.hierarchy.sessions.session import Session

MAX_TENANT_BYTES = 1 << 20
"""Bytes of facts that are kept for one tenant."""

MAX_TENANT_NAMESPACES = 64

DOOR = "door"
"""A fact: the way that blocks take into the well, where an engine has several. All that is stored differs with it."""

MAX_DIFFERENT = 16
"""Facts by which namespaces may differ; those that differ by more are of other models."""

Difference = tuple[str, str, str]
"""Name of a fact, value here, value there."""


class KnownFacts:
    """Each namespace has the facts of the session that was live in it last."""

    def __init__(self) -> None:
        self._of: dict[str, dict[bytes, tuple[bytes, ...]]] = {}  # by tenant and tag; those noted last come last

    def note(self, session: Session) -> None:
        """The session is live now."""
        assert session.scheduler is not None
        try:
            tag = session.tag
        except AccessDenied:
            return  # without keys nothing of it is stored
        hello = session.scheduler.hello
        texts = (facts_text(_said(session)), hello.facts, session.workers[0].hello.facts)
        own = self._own(session.tenant)
        own.pop(tag, None)
        own[tag] = texts
        while len(own) > MAX_TENANT_NAMESPACES or _nbytes(own) > MAX_TENANT_BYTES:
            del own[next(iter(own))]

    def _own(self, tenant: str) -> dict[bytes, tuple[bytes, ...]]:
        return self._of.setdefault(tenant, {})

    def others(self, tenant: str, tag: bytes) -> Iterator[bytes]:
        """Tags of the tenant's other namespaces that something is known of."""
        own = self._own(tenant)
        return iter([other for other in own if other != tag] if tag in own else [])

    def differences(self, tenant: str, tag: bytes, other: bytes) -> list[Difference]:
        """What differs between two namespaces of the tenant, at most MAX_DIFFERENT facts; none if it is more. Of those
        with the same weights and another door, the door alone: the rest follows from that."""
        own = self._own(tenant)
        here, there = _facts(own.get(tag, ())), _facts(own.get(other, ()))
        if here.get(DOOR) != there.get(DOOR) and here.get("weights") == there.get("weights"):
            here, there = {DOOR: here.get(DOOR, "")}, {DOOR: there.get(DOOR, "")}
        found = list(islice(differences(here, there), MAX_DIFFERENT + 1))
        return found if len(found) <= MAX_DIFFERENT else []


def _facts(texts: tuple[bytes, ...]) -> dict[str, str]:
    return {name: value for text in texts for name, value in facts_of(text).items()}


def _nbytes(own: dict[bytes, tuple[bytes, ...]]) -> int:
    return sum(len(text) for texts in own.values() for text in texts)


def _said(session: Session) -> dict[str, str]:
    """Facts that every scheduler says, in fields of its own. Of the weights only what tells two apart."""
    assert session.scheduler is not None
    hello = session.scheduler.hello
    said = {
        "weights": hello.weights[:8].hex(),
        "block_tokens": str(hello.block_tokens),
        "ranks": str(hello.world),
        "ranks.same_kv": str(hello.replicas),
        "shard_bytes": str(hello.shard_bytes),
    }
    for number, group in enumerate(hello.groups):
        said |= {f"group.{number}.{name}": str(getattr(group, name)) for name in group.__struct_fields__}
    return said
