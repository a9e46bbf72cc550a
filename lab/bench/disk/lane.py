"""A disk tier with threads and an arena of its own, driven as a level drives it, and the bare loops beside it.

Blocks lie in shared memory, populated before, and walk through more of it than a cache holds. The bare loops move as
many bytes with as many threads between huge-page buffers and a file on the same filesystem: what the device gives here.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lab.bench.disk.passes import Pass, timed
from stepwell.block.layout import MiB, SlabLayout
from stepwell.block.namespace import BlockId, Namespace
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.levels.reads import MAX_BATCH
from stepwell.hierarchy.levels.writes import WRITERS
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io import staging
from stepwell.io.clock import MonotonicClock
from stepwell.io.files import SystemFiles
from stepwell.io.memory import PIECE, Bytes, SystemMemory
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.tiers.base import Reading, Writing
from stepwell.tiers.disk.tier import DiskTier, Site
from stepwell.vault.keyring import Keyring

THREADS = 4
REQUEST = 2 * MiB
"""Bytes of a bare read that stands beside recalls."""
LIMIT = 16 << 30
"""Of the tier: large enough for segments of 256 MiB."""

_PATIENCE_S = 60.0


class Arena:
    """`count` blocks of `nbytes`, one shard each, in one slab."""

    def __init__(self, nbytes: int, count: int) -> None:
        layout = SlabLayout(nbytes, count)
        memory = SystemMemory().make(layout.nbytes)
        for start in range(0, layout.nbytes, PIECE):
            memory.populate(start, min(PIECE, layout.nbytes - start))
        self.slab = Slab(1, Owner("bench", b"", nbytes), layout, memory)
        self.nbytes = nbytes * count
        for slot in range(count):
            self.slab.payload(slot)[:] = slot % 251

    def close(self) -> None:
        self.slab.close()


class Lane:
    """A tier in `folder`. `sealed`: with AES-256-GCM, else plain. `keyring`: None for one of its own."""

    def __init__(self, folder: Path, *, sealed: bool, limit: int = LIMIT, keyring: Keyring | None = None) -> None:
        keyring = keyring or Keyring.ephemeral()
        self._sealing = Sealing(keyring, sealed=sealed, wall=time.time)
        (self._origin,) = self._sealing.origins("default", Namespace(b"w" * 32, b"m" * 32, b"l" * 32, 16))
        self._wakeup = Wakeup()
        self._clock = MonotonicClock()
        self._executor = ThreadExecutor(self._wakeup, THREADS)
        site = Site(SystemFiles(folder), limit, 0)
        self.tier = DiskTier([site], self._executor, self._clock, time.time, self._sealing)
        recovered: list[int] = []
        self.tier.recover(recovered.append)
        self._until(lambda: bool(recovered))

    def entries(self, arena: Arena) -> list[Entry]:
        """New blocks for all slots of the arena."""
        entries = [
            Entry(BlockId(secrets.token_bytes(32)), ((arena.slab, slot),), None)
            for slot in range(arena.slab.layout.slots)
        ]
        for entry in entries:
            entry.origin = self._origin
        return entries

    def spill(self, entries: Sequence[Entry]) -> None:
        """Writes them all. Raises RuntimeError if one is not taken."""

        def begin(batch: Sequence[Entry], done: Callable[[bool], None]) -> None:
            def ended(answers: list[Writing]) -> None:
                done(all(answer is Writing.STORED for answer in answers))

            self.tier.write([self._sealing.outgoing(entry) for entry in batch], ended)

        self._drive(entries, WRITERS, begin)

    def recall(self, entries: Sequence[Entry]) -> None:
        """Reads them all into their slots. Raises RuntimeError if one is not good."""

        def begin(batch: Sequence[Entry], done: Callable[[bool], None]) -> None:
            def ended(answers: list[Reading]) -> None:
                done(all(answer is Reading.GOOD for answer in answers))

            self.tier.read([self._sealing.incoming(entry) for entry in batch], ended)

        self._drive(entries, THREADS, begin)

    def _drive(
        self, entries: Sequence[Entry], width: int, begin: Callable[[Sequence[Entry], Callable[[bool], None]], None]
    ) -> None:
        most = max(1, MAX_BATCH // entries[0].nbytes)
        batches = [entries[at : at + most] for at in range(0, len(entries), most)]
        begun = 0
        ended: list[bool] = []

        while len(ended) < len(batches):
            while begun < len(batches) and begun - len(ended) < width:
                begin(batches[begun], ended.append)
                begun += 1
            before = len(ended)
            self._until(lambda before=before: len(ended) > before)  # type: ignore[misc]
        if not all(ended):
            raise RuntimeError(f"{ended.count(False)} batches were not moved: {self.tier.counts}")

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not holds():
            if not self._executor.complete(self._clock, 0.0) and not holds():
                self._wakeup.wait(1.0)
            if time.monotonic() > deadline:
                raise TimeoutError("the disk tier does not answer")

    def close(self) -> None:
        self._executor.close(_PATIENCE_S)
        self.tier.close()
        self._wakeup.close()


class Bare:
    """A file of `nbytes` and THREADS threads that read or write it in pieces, each with a buffer in huge pages."""

    def __init__(self, folder: Path, name: str, nbytes: int) -> None:
        self._files = SystemFiles(folder)
        self._name = name
        self.nbytes = nbytes
        self._buffers: list[Bytes] = []

    def create(self) -> None:
        """The file, allocated and never written."""
        self._files.create(self._name, self.nbytes).close()

    def remove(self) -> None:
        self._files.unlink(self._name)

    def read_s(self, nbytes: int) -> float:
        """The seconds that reading so many bytes from the beginning takes."""
        began = time.perf_counter()
        self.move(REQUEST, write=False, nbytes=nbytes)
        return time.perf_counter() - began

    def move(self, piece: int, *, write: bool, nbytes: int | None = None) -> None:
        """`nbytes`: of the file, from its beginning; None for all."""
        total = self.nbytes if nbytes is None else nbytes
        if not self._buffers or len(self._buffers[0]) < piece:
            self._buffers = [staging.make(piece) for _ in range(THREADS)]
        offsets = iter(range(0, total, piece))
        lock = threading.Lock()

        def work(buffer: Bytes) -> None:
            file = self._files.open(self._name)
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    break
                part = buffer[: min(piece, total - offset)]
                if write:
                    file.write(part, offset)
                elif file.read(part, offset) != len(part):
                    raise OSError("short read")
            file.close()

        in_threads([lambda buffer=buffer: work(buffer) for buffer in self._buffers])  # type: ignore[misc]

    def close(self) -> None:
        self._files.close()


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Runs them side by side. Raises the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - carried to the caller
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def cipher_work(arena: Arena, *, opening: bool) -> None:
    """AES-256-GCM over the arena's blocks in pieces of 1 MiB, THREADS threads with one buffer each: sealed from the
    blocks into the buffer, or opened from the buffer into the blocks. The least that a sealed pass costs."""
    cipher, whole = AESGCM(bytes(32)), 1 << 20
    pieces = [
        payload[at : at + whole]
        for payload in (arena.slab.payload(slot) for slot in range(arena.slab.layout.slots))
        for at in range(0, len(payload), whole)
    ]
    waiting, lock, nonce = iter(pieces), threading.Lock(), bytes(12)

    def work(buffer: Bytes) -> None:
        sealed = cipher.encrypt(nonce, bytes(len(pieces[0])), None)
        buffer[: len(sealed)] = np.frombuffer(sealed, np.uint8)
        while True:
            with lock:
                piece = next(waiting, None)
            if piece is None:
                return
            if opening:
                cipher.decrypt_into(nonce, buffer[: len(sealed)].data, None, piece.data)
            else:
                cipher.encrypt_into(nonce, piece.data, None, buffer[: len(piece) + 16].data)

    buffers = [staging.make(whole + 16) for _ in range(THREADS)]
    in_threads([lambda b=b: work(b) for b in buffers])  # type: ignore[misc]


def copy_pass(arena: Arena, piece: int) -> Pass:
    """memcpy of the arena's blocks into one buffer, one thread."""
    buffer = np.empty(piece, np.uint8)
    payloads = [arena.slab.payload(slot)[:piece] for slot in range(arena.slab.layout.slots)]

    def work() -> None:
        for payload in payloads:
            np.copyto(buffer, payload)

    return timed(len(payloads) * piece, work)


def sync(folder: Path) -> None:
    """What is dirty goes to the device now, not in somebody's measured time."""
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
