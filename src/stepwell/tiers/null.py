"""The tier that keeps nothing: stands where none is configured, and is the floor of every comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepwell.tiers.base import (
    Capacity,
    FrameKey,
    Lookup,
    Miss,
    MissReason,
    Read,
    Refused,
    RefusedReason,
    Write,
    examine,
)


class NullTier:
    """Misses and refuses at once."""

    name = "null"

    def __init__(self) -> None:
        self._closed = False

    def lookup(self, keys: Sequence[FrameKey]) -> list[Lookup]:
        examine(keys, closed=self._closed)
        return [Miss(MissReason.ABSENT) for _ in keys]

    def read(self, key: FrameKey, into: memoryview) -> Read:
        examine([key], closed=self._closed)
        return Miss(MissReason.ABSENT)

    def write(self, key: FrameKey, frame: memoryview) -> Write:
        examine([key], closed=self._closed)
        return Refused(RefusedReason.TOO_LARGE)

    def drop(self, keys: Sequence[FrameKey]) -> None:
        examine(keys, closed=self._closed)

    def capacity(self) -> Capacity:
        examine([], closed=self._closed)
        return Capacity(used=0, limit=0)

    def recover(self) -> Iterator[FrameKey]:
        examine([], closed=self._closed)
        return iter(())

    def close(self) -> None:
        self._closed = True
