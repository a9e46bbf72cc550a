"""The tier that keeps nothing: stands where none is configured, and is the floor of every comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepwell.block.namespace import BlockId
from stepwell.tiers.base import Capacity, Forgotten, Incoming, Outgoing, ReadDone, TierCounts, WriteDone


class NullTier:
    """Has nothing and takes nothing: its capacity is 0, so that nobody reads or writes."""

    name = "null"

    def __init__(self) -> None:
        self.counts = TierCounts()

    def lookup(self, id: BlockId) -> bool:
        return False

    def touch(self, id: BlockId) -> None:
        pass

    def read(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        raise LookupError("the null tier has no blocks")

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        raise LookupError("the null tier takes no blocks")

    def drop(self, id: BlockId) -> None:
        pass

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        done(Forgotten())

    def capacity(self) -> Capacity:
        return Capacity(used=0, limit=0)

    def figures(self) -> dict[str, int]:
        return {}

    def recover(self, done: Callable[[int], None]) -> None:
        done(0)

    def settle(self, done: Callable[[], None]) -> None:
        done()

    def close(self) -> None:
        pass
