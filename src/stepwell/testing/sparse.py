"""Shared memory that behaves like the real one and costs almost nothing: pages appear when they are touched.

Slabs of the arena have at least 16 MiB, which tests that make hundreds of them would spend their time zeroing.
"""

from __future__ import annotations

from stepwell.errors import CapacityError
from stepwell.io.memory import SharedMemory


class SparseShared(SharedMemory):
    """A real sealed memfd that is not populated in advance; punching it is real."""

    def populate(self, start: int, length: int) -> None:
        pass


class SparseMemory:
    """A `Memory` that a test can make refuse. `made`: everything that it ever made."""

    def __init__(self) -> None:
        self.refuse = False
        self.made: list[SparseShared] = []

    def make(self, nbytes: int) -> SharedMemory:
        if self.refuse:
            raise CapacityError("SW-202", what="no memory", why="the test said so", fix="none")
        shared = SparseShared(nbytes)
        self.made.append(shared)
        return shared
