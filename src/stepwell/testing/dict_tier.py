"""The smallest tier that keeps its promises: a dict of bytes. The kit is proven on it; other tests put it where a tier
is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from stepwell.tiers.base import (
    Capacity,
    FrameKey,
    Hit,
    Lookup,
    Miss,
    MissReason,
    Read,
    Refused,
    RefusedReason,
    Stored,
    Write,
    examine,
)


class DictTier:
    """Holds at most `limit` bytes and evicts what was written first. `left` is what an earlier life left."""

    name = "dict"

    def __init__(self, limit: int, left: dict[FrameKey, bytes] | None = None) -> None:
        self.frames: dict[FrameKey, bytes] = dict(left or {})
        self._limit = limit
        self._used = sum(map(len, self.frames.values()))
        self._lock = threading.Lock()
        self._closed = False

    def lookup(self, keys: Sequence[FrameKey]) -> list[Lookup]:
        with self._lock:
            examine(keys, closed=self._closed)
            found = [self.frames.get(key) for key in keys]
        return [Miss(MissReason.ABSENT) if frame is None else Hit(len(frame)) for frame in found]

    def read(self, key: FrameKey, into: memoryview) -> Read:
        with self._lock:
            examine([key], closed=self._closed)
            frame = self.frames.get(key)
        if frame is None:
            return Miss(MissReason.ABSENT)
        if len(frame) > into.nbytes:
            return Miss(MissReason.DAMAGED)
        into.cast("B")[: len(frame)] = frame
        return Hit(len(frame))

    def write(self, key: FrameKey, frame: memoryview) -> Write:
        copy = bytes(frame)
        with self._lock:
            examine([key], closed=self._closed)
            self._forget(key)
            if len(copy) > self._limit:
                return Refused(RefusedReason.TOO_LARGE)
            while self._used + len(copy) > self._limit:
                self._forget(next(iter(self.frames)))
            self.frames[key] = copy
            self._used += len(copy)
        return Stored()

    def drop(self, keys: Sequence[FrameKey]) -> None:
        with self._lock:
            examine(keys, closed=self._closed)
            for key in keys:
                self._forget(key)

    def capacity(self) -> Capacity:
        with self._lock:
            examine([], closed=self._closed)
            return Capacity(self._used, self._limit)

    def recover(self) -> Iterator[FrameKey]:
        with self._lock:
            examine([], closed=self._closed)
            return iter(list(self.frames))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.frames.clear()

    def _forget(self, key: FrameKey) -> None:
        self._used -= len(self.frames.pop(key, b""))
