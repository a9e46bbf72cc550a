"""Reads of one block beside sustained writes, in two systems: a well, and bare files.

Both write at a given rate and read at random moments, on the same filesystem; both give the time of every read and what
was really written meanwhile. In the well, one engine spills new blocks and another asks for blocks that only the disk
has; a read is over when the block is pinned in host memory. In the bare system, as many threads as the well has writers
write batches of 8 MiB and one thread reads, all in requests of the tier's size, to and from files that were written
before; every other of its reads also opens what it has read, with AES-256-GCM into shared memory, as the well must.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lab.bench import wells
from lab.rig.session import Session
from stepwell.block.layout import MiB
from stepwell.client import control
from stepwell.hierarchy.levels.reads import MAX_BATCH
from stepwell.hierarchy.levels.writes import WRITERS
from stepwell.io import staging
from stepwell.io.files import SystemFiles
from stepwell.io.memory import Bytes, SystemMemory

BLOCK, PIECE, PART, TAG = 4 * MiB, 2 * MiB, MiB, 16
"""Bytes of a block, of a request of the bare system, of what is opened at once, and of the tag at its end."""
HOST, DISK, FILE = 512 * MiB, 8 << 30, 4 << 30
OLD, KNOWN = 2 * HOST // BLOCK, (DISK // 2) // BLOCK
"""A block is read when at least OLD others were spilled after it, so that host memory has it no more, and fewer than
KNOWN, so that the disk still has it."""
BETWEEN_S = 0.015
"""The mean time from the end of a read to the beginning of the next."""

_PATIENCE_S = 10.0
_DISK = "disk"


@dataclass(slots=True)
class Window:
    """`reads`: seconds of each. `opened`: the same, of bare reads that also open. `gone`: blocks that
    were asked for and were not on disk, since host memory had no room for them until they could be written."""

    seconds: float = 0.0
    written: int = 0
    gone: int = 0
    reads: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Bytes written a second."""
        return self.written / self.seconds


@contextmanager
def at_rate(rate: float, write: Callable[[int], None], piece: int, threads: int) -> Iterator[None]:
    """Calls `write`, on so many threads, for pieces that are due at `rate` bytes a second: not at all for a rate of 0.
    What cannot be done in time is done as soon as possible. The argument counts the pieces."""
    ending, lock = threading.Event(), threading.Lock()
    began, begun = time.perf_counter(), 0

    def work() -> None:
        nonlocal begun
        while not ending.is_set():
            with lock:
                number, begun = begun, begun + 1
            if ending.wait(max(0.0, began + number * piece / rate - time.perf_counter())):
                return
            write(number)

    workers = [threading.Thread(target=work) for _ in range(threads if rate else 0)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        ending.set()
        for worker in workers:
            worker.join()


def read_for(seconds: float, read: Callable[[], None]) -> None:
    """Reads at random moments."""
    until = time.perf_counter() + seconds
    while (pause := random.expovariate(1 / BETWEEN_S)) < until - time.perf_counter():
        time.sleep(pause)
        read()


class WellSide:
    """A well with a small arena over a disk tier in `folder`, which is filled first."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._writer = Session(home, BLOCK, label="bench")
        self._reader = Session(home, BLOCK, label="bench")
        self._writer.join()
        self._reader.join()
        self._known: list[bytes] = []

    def fill(self, rate: float) -> None:
        """Writes as much as the disk may have, so that what is written later goes where something was before."""
        before = self._written()
        while self._written() - before < DISK:
            with at_rate(rate, self._spill, BLOCK, 1):
                time.sleep(1.0)
            self.settle()

    def settle(self) -> None:
        """Waits until nothing is left to write."""
        while control.stats(self._home)[f"{_DISK}_write_queue_bytes"]:
            time.sleep(0.01)

    def window(self, rate: float, seconds: float, *, reading: bool = True) -> Window:
        """Spills at this rate and, if wanted, reads meanwhile."""
        window = Window()
        with at_rate(rate, self._spill, BLOCK, 1):
            time.sleep(seconds / 4)  # until it is as it will be
            before, began = self._written(), time.perf_counter()
            if reading:
                read_for(seconds, lambda: self._read(window))
            else:
                time.sleep(seconds)
            window.written = self._written() - before
            window.seconds = time.perf_counter() - began
        self.settle()
        return window

    def _written(self) -> int:
        return int(control.stats(self._home)[f"{_DISK}_device_written_bytes"])

    def _spill(self, number: int) -> None:
        digest = secrets.token_bytes(32)
        spill = self._writer.reserve(digest, poll_s=2e-4)
        assert spill is not None, f"the session has ended: {self._writer.troubles}"
        self._writer.acknowledge(spill)
        if any(spill.leases):
            self._known.append(digest)
            del self._known[:-KNOWN]

    def _read(self, window: Window) -> None:
        digest = self._known.pop(random.randrange(len(self._known) - OLD))
        scheduler, began = self._reader.scheduler, time.perf_counter()
        ask = scheduler.ask(digest, 0, 0)
        assert ask is not None, f"the session has ended: {self._reader.troubles}"
        scheduler.settle(ask, _PATIENCE_S)
        if ask.blocks:
            window.reads.append(time.perf_counter() - began)
        else:
            window.gone += 1
        scheduler.release(ask)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


@contextmanager
def well_side(folder: Path) -> Iterator[WellSide]:
    wishes = {"disk": f"{folder}:{DISK // MiB}MiB", "disk_reserve": "1GiB", "recall": "always"}
    with wells.well(HOST, **wishes) as home:
        side = WellSide(home)
        try:
            yield side
        finally:
            side.close()


class BareSide:
    """Two files in `folder`: one is read at random places, one written in order, over and over."""

    def __init__(self, folder: Path) -> None:
        self._files = SystemFiles(folder)
        self._buffers: dict[int, Bytes] = {}
        self._cipher, self._nonce = AESGCM(bytes(32)), bytes(12)
        self._opened = SystemMemory().make(BLOCK)
        self._opened.populate(0, BLOCK)
        sealed = np.frombuffer(self._cipher.encrypt(self._nonce, bytes(PART - TAG), None), np.uint8)
        buffer = self._buffer(MAX_BATCH)
        buffer.reshape(-1, PART)[:] = sealed
        for name in ("read", "written"):
            self._files.create(name, FILE).close()
            with self._files.open(name) as file:
                for offset in range(0, FILE, MAX_BATCH):
                    file.write(buffer, offset)
        self._read_file, self._written_file = self._files.open("read"), self._files.open("written")

    def _buffer(self, nbytes: int) -> Bytes:
        """One for each thread."""
        thread = threading.get_ident()
        if len(self._buffers.get(thread, ())) < nbytes:
            self._buffers[thread] = staging.make(nbytes)
        return self._buffers[thread][:nbytes]

    def window(self, rate: float, seconds: float, *, reading: bool = True) -> Window:
        """As `WellSide.window`."""
        self._buffers.clear()
        window = Window()
        done: list[int] = []

        def write(number: int) -> None:
            self._write(number * MAX_BATCH % FILE)
            done.append(MAX_BATCH)

        with at_rate(rate, write, MAX_BATCH, WRITERS):
            time.sleep(seconds / 4)
            before, began = len(done), time.perf_counter()
            if reading:
                read_for(seconds, lambda: self._read(window))
            else:
                time.sleep(seconds)
            window.written = sum(done[before:])
            window.seconds = time.perf_counter() - began
        return window

    def _read(self, window: Window) -> None:
        opening = len(window.opened) < len(window.reads)
        first, buffer = random.randrange(FILE // BLOCK) * BLOCK, self._buffer(PIECE)
        began = time.perf_counter()
        for offset in range(first, first + BLOCK, PIECE):
            self._read_file.read(buffer, offset)
            for part in range(0, PIECE if opening else 0, PART):
                into = self._opened.bytes[offset - first + part :][: PART - TAG]
                self._cipher.decrypt_into(self._nonce, buffer[part : part + PART].data, None, into.data)
        (window.opened if opening else window.reads).append(time.perf_counter() - began)

    def _write(self, offset: int) -> None:
        for at in range(offset, offset + MAX_BATCH, PIECE):
            self._written_file.write(self._buffer(PIECE), at)

    def close(self) -> None:
        self._opened.close()
        self._files.close()
        self._buffers.clear()
