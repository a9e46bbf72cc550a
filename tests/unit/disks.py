"""Lives of a disk tier over real files, with blocks that are sealed for real, and files that fail when told to."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from blake3 import blake3

import golden
from stepwell.block.layout import PAGE, SlabLayout
from stepwell.block.namespace import BlockId
from stepwell.codecs.base import Codec, name_of
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.files import Files, SystemFile, SystemFiles
from stepwell.io.memory import Bytes, SystemMemory
from stepwell.io.staging import make
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.tiers.base import Forgotten, Outgoing, Place, Reading, Writing
from stepwell.tiers.disk.layout import Head
from stepwell.tiers.disk.tier import DiskTier, Site
from stepwell.vault.keyring import Keyring

MIB = 1 << 20
SHARD, SHARDS = 130_000, 2
BLOCK = SHARDS * 135_168  # bytes of its frames
SEGMENT = 16 * MIB
PER_SEGMENT = 62  # blocks
SPACE = 10_000
"""Numbers of blocks in one namespace: the next have the next one."""
_SPACES = 3
_OWNER = Owner("default", b"m" * 32, SHARD)


@functools.lru_cache(maxsize=1024)
def content(n: int, shard: int) -> Bytes:
    return np.frombuffer(blake3(f"{n} {shard}".encode()).digest(length=SHARD), np.uint8)


def digest(n: int) -> bytes:
    return blake3(n.to_bytes(8, "big")).digest()


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class FaultyFile(SystemFile):
    def __init__(self, files: FaultyFiles, name: str, inner: SystemFile) -> None:
        super().__init__(inner._fd)
        inner._fd = -1  # it is ours now
        self._files, self._name = files, name

    def read(self, into: Bytes, offset: int) -> int:
        flips = self._files.meet("read", self._name, offset) == "flip"
        got = super().read(into, offset)
        if flips:
            into[40] ^= 1
        return got

    def write(self, data: Bytes, offset: int) -> None:
        if self._files.meet("write", self._name, offset) == "lose":
            return
        super().write(data, offset)

    def zero(self, offset: int, nbytes: int) -> int:
        self._files.meet("zero", self._name, offset)
        if self._files.zeros:
            return super().zero(offset, nbytes)
        super().write(make(nbytes)[:nbytes], offset)  # as on a filesystem that cannot do it by itself
        return nbytes

    def sync(self) -> None:
        self._files.meet("sync", self._name)
        super().sync()


class FaultyFiles(SystemFiles):
    """`fault(operation, name, offset)` is asked before each: raises OSError, or says "lose" for a write that is said to
    be done and is not, "flip" for a read that is wrong this once. `available`: what `free` says, where that is set.
    `zeros`: the filesystem can make them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fault: Callable[[str, str, int], str | None] = lambda operation, name, offset: None
        self.seen: list[tuple[str, str, int]] = []
        self.available: Callable[[], int] | None = None
        self.zeros = True

    def meet(self, operation: str, name: str, offset: int = 0) -> str | None:
        self.seen.append((operation, name, offset))
        return self.fault(operation, name, offset)

    def fail(self, code: int, *operations: str, only: int = 0) -> None:
        """From now on each of these operations fails, or just the one that comes as number `only`."""
        met = 0

        def fault(operation: str, name: str, offset: int) -> None:
            nonlocal met
            met += operation in operations
            if operation in operations and only in (0, met):
                raise failure(code)

        self.fault = fault

    def heal(self) -> None:
        self.fault = lambda operation, name, offset: None

    def names(self) -> list[str]:
        self.meet("names", "")
        return super().names()

    def create(self, name: str, nbytes: int) -> SystemFile:
        self.meet("create", name, nbytes)
        return FaultyFile(self, name, super().create(name, nbytes))

    def open(self, name: str) -> SystemFile:
        self.meet("open", name)
        return FaultyFile(self, name, super().open(name))

    def unlink(self, name: str) -> None:
        self.meet("unlink", name)
        super().unlink(name)

    def sync(self) -> None:
        self.meet("sync", "")
        super().sync()

    def free(self) -> tuple[int, int]:
        available, total = super().free()
        return (self.available() if self.available else available), total


class Life:
    """One life of a tier over `folders`."""

    def __init__(
        self,
        *folders: Path,
        limit: int = 64 * MIB,
        reserve: int = 0,
        keyring: Keyring = golden.KEYRING,
        sealed: bool = True,
        seed: int = 1,
        fault: Callable[[FaultyFiles], None] = lambda files: None,
        recovers: bool = True,
        simulated: Sequence[Files] = (),
        segment: int | None = None,
        codec: Codec | None = None,
    ) -> None:
        """`simulated`: files of another kind, in place of folders."""
        self.executor, self.clock = SeededExecutor(seed), SetClock()
        self.files = [FaultyFiles(folder) for folder in folders]
        for files in self.files:
            fault(files)
        self.sealing = Sealing(keyring, sealed=sealed, wall=lambda: golden.NOW, codec=codec)
        self.troubles: list[tuple[str, BaseException]] = []
        sites = [Site(files, limit, reserve, segment) for files in [*self.files, *simulated]]
        self.tier = DiskTier(
            sites, self.executor, self.clock, lambda: golden.NOW, self.sealing, lambda *trouble: self.note(*trouble)
        )
        namespace = replace(golden.NAMESPACE, codec=b"" if codec is None else name_of(codec))
        self.origins = [self.sealing.origins("default", namespace.at_epoch(n))[0] for n in range(_SPACES)]
        layout = SlabLayout(SHARD, 64)
        self._memory = SystemMemory().make(layout.nbytes)
        self._slab = Slab(1, _OWNER, layout, self._memory)
        self._slot = 0
        self.recovered: list[int] = []
        if recovers:
            self.tier.recover(self.recovered.append)
            self.executor.drain()

    def close_memory(self) -> None:
        """Where there are very many lives: each has a descriptor."""
        self._memory.close()

    def note(self, kind: str, error: BaseException) -> None:
        self.troubles.append((kind, error))

    def id(self, n: int) -> BlockId:
        return self.origins[n // SPACE].name(digest(n))

    def entry(self, n: int) -> Entry:
        slots = []
        for _ in range(SHARDS):
            slots.append((self._slab, self._slot))
            self._slot = (self._slot + 1) % self._slab.layout.slots
        entry = Entry(self.id(n), tuple(slots), None)
        entry.origin = self.origins[n // SPACE]
        return entry

    def write(self, *numbers: int) -> list[list[Writing]]:
        """Asks; the answers come into the list."""
        answers: list[list[Writing]] = []
        self.tier.write([self.outgoing(n) for n in numbers], answers.append)
        return answers

    def outgoing(self, n: int) -> Outgoing:
        """Its slots are filled when its frames are made: any number may wait."""
        entry = self.entry(n)
        outgoing = self.sealing.outgoing(entry)

        def make(part: int, into: Bytes, place: Place) -> None:
            for shard, (slab, slot) in enumerate(entry.slots):
                slab.payload(slot)[:] = content(n, shard)
            outgoing.make(part, into, place)

        return replace(outgoing, make=make)

    def put(self, *numbers: int) -> list[Writing]:
        """Writes up to 8 blocks."""
        answers = self.write(*numbers)
        self.executor.drain()
        return answers[0]

    def put_all(self, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, 8):
            some = range(first, min(first + 8, numbers.stop))
            assert self.put(*some) == [Writing.STORED] * len(some)

    def get(self, n: int) -> Reading:
        """Reads it; if it is GOOD it is what was written, and if not, nothing is left of it."""
        entry = self.entry(n)
        for slab, slot in entry.slots:
            slab.payload(slot)[:] = 0xEE
        answers: list[list[Reading]] = []
        self.tier.read([self.sealing.incoming(entry)], answers.append)
        self.executor.drain()
        ((reading,),) = answers
        for shard, (slab, slot) in enumerate(entry.slots):
            got = slab.payload(slot)
            if reading is Reading.GOOD:
                assert (got == content(n, shard)).all(), "a block that is GOOD is what was written"
            else:
                assert not got.any() or (got == 0xEE).all()
        return reading

    def good(self, numbers: range) -> set[int]:
        return {n for n in numbers if self.get(n) is Reading.GOOD}

    def here(self, numbers: range) -> set[int]:
        return {n for n in numbers if self.tier.lookup(self.id(n))}

    def settle(self) -> None:
        settled: list[bool] = []
        self.tier.settle(lambda: settled.append(True))
        self.executor.drain()
        assert settled == [True]

    def tag(self, space: int) -> bytes:
        return self.origins[space].tag

    def clear(self, space: int | None = None) -> Forgotten:
        """Of everything, or of one namespace."""
        cleared: list[Forgotten] = []
        self.tier.clear(cleared.append, self.tag(space) if space is not None else b"")
        assert not cleared, "no completion comes inside the call"
        self.executor.drain()
        (forgotten,) = cleared
        return forgotten

    def end(self) -> None:
        """As a well that is asked to end."""
        self.settle()
        self.tier.close()

    def kill(self) -> None:
        """As if the process were gone: nothing that is under way goes on."""
        self.executor = SeededExecutor(0)
        for files in self.files:
            files.fail(errno.EBADF, "read", "write", "zero", "sync", "create", "open", "unlink")
        self.tier.close()


def segments(folder: Path) -> list[Path]:
    """Oldest first."""

    def sequence(path: Path) -> int:
        with path.open("rb") as file:
            head = Head.parse(file.read(PAGE))
        return head.sequence if head is not None else 0

    return sorted((path for path in folder.glob("*.seg") if path.is_file()), key=sequence)


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
