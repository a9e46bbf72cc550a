"""Cold pages on disk: one extent each in an unnamed file, sealed under a key that only this process has.

AES-256-GCM per page. The nonce is the ordinal of the write, never used again; nonce and tag of the present page of each
place are kept in memory only, so an extent that was changed, moved or restored from an earlier write does not open. A
page costs 36 bytes of memory. The file ends with the process, and cannot be read without the key.

O_DIRECT is used where an extent wastes at most an eighth of itself by being whole pages of 4 KiB. It costs nothing when
the disk has to be asked (measured, ext4 on a virtual disk: 51 us for 12 KiB either way, 1.3 against 1.2 GB/s in order;
writes 2.6 against 0.4 GB/s), and without it the kernel's cache would keep a second copy in host memory that no limit of
ours counts: pages that shall lie in memory belong to the host tier. Smaller pages, of a token or two, go through the
page cache side by side; their read speed then says nothing about the disk. `direct` tells which it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stepwell.io.memory import Bytes
from stepwell.io.staging import Staging
from stepwell.longctx.store import trouble
from stepwell.longctx.store.budget import Budget, shared
from stepwell.longctx.store.file import ALIGNMENT, OpenFile, UnnamedFile
from stepwell.longctx.store.gate import StoreGate
from stepwell.longctx.store.places import Numbers, StorePlaces, check_pages, grown, numbers
from stepwell.vault.memory import KEY_BYTES, cells

LONGEST = 1 << 20
"""Bytes from the first extent of a run to the last one."""

SHARE = 32 << 10
"""Bytes that are worth handing to another thread: one costs some 30 us, a page that the disk is asked for some 50."""

Run = tuple[int, int]
"""Half-open range of indexes into the sorted extents."""


def runs(offsets: Numbers, extent: int, gap: int) -> list[Run]:
    """Runs of the extents that begin at `offsets`, ascending: each begins at most `gap` bytes behind the one before it,
    and less than LONGEST behind the first of its run."""
    if len(offsets) == 0:
        return []
    apart = np.diff(offsets, prepend=offsets[0] - extent) > extent + gap
    group = np.cumsum(apart)
    begins = offsets[np.searchsorted(group, group)]
    piece = (offsets - begins) // LONGEST
    edges = np.flatnonzero((np.diff(group, prepend=-1) > 0) | (np.diff(piece, prepend=0) != 0)).tolist()
    return list(pairwise([*edges, len(offsets)]))


def shares(found: list[Run], extent: int, threads: int) -> list[list[Run]]:
    """The runs, in order, for at most `threads` threads: each has about as many extents, and enough to be worth it."""
    count = found[-1][1] if found else 0
    most = min(threads, len(found), 1 + count * extent // SHARE)
    dealt: list[list[Run]] = [[] for _ in range(max(1, most))]
    for run in found:
        dealt[run[0] * len(dealt) // count].append(run)
    return [share for share in dealt if share]


TAG, NONCE = 16, 12
GAP = 16 << 10
"""Bytes between two wanted extents that are read along with them: cheaper than one more call."""

T = TypeVar("T")
STEP = 64 << 20
"""Space is reserved in steps of this many bytes, so that a full disk is noticed before anything is written."""


class DiskFile:
    """A PageStore in the filesystem of `directory`, in whole extents: of at most `capacity` bytes, or of what a budget
    that it may share with others has left. Extents in use count; up to 64 MiB of what is left are reserved ahead, and
    space that pages had stays with the file for later ones until no page is left: then all of it is given back.

    Requests are spread over `threads` threads. `pinned`: what `get` returns lies in page-locked memory where there is a
    CUDA device. Raises AccessDenied SW-608 where no file can be made.
    """

    def __init__(
        self,
        directory: Path,
        page_bytes: int,
        capacity: int | Budget,
        *,
        threads: int = 4,
        pinned: bool = False,
        open_file: OpenFile = UnnamedFile,
    ) -> None:
        if page_bytes < 1 or threads < 1:
            raise ValueError(f"pages of {page_bytes} bytes, for {threads} threads")
        self._budget = shared(capacity)
        aligned = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self._file = open_file(directory, aligned - page_bytes <= page_bytes // 8)
        self.page_bytes = page_bytes
        self.direct = self._file.direct
        self.extent_bytes = aligned if self.direct else page_bytes
        self.bytes_read = 0
        """Bytes read from the file so far, gaps between wanted extents included."""
        self.pinned = pinned and torch.cuda.is_available()
        self._cipher: AESGCM | None = AESGCM(cells.take(secrets.token_bytes(KEY_BYTES)))
        self._gate = StoreGate()
        self._lock = threading.Lock()
        self._places = StorePlaces(self._budget.limit // self.extent_bytes)
        self._reserved = 0
        self._writes = 0
        self._ordinals = np.zeros(0, np.uint64)  # ordinal of the last write to each place
        self._tags = np.zeros((0, TAG), np.uint8)
        self._staging = Staging(LONGEST + self.extent_bytes + TAG)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stepwell-pages")

    @property
    def room(self) -> int:
        """Number of pages that still fit, as far as the disk has space for them."""
        with self._lock:
            return min(self._places.room, self._budget.left // self.extent_bytes)

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        """Raises CapacityError SW-209: over the limit, or the disk or its quota is full. BackendDown SW-508: the disk
        failed. Then nothing is stored."""
        check_pages(payload, self.page_bytes)
        with self._gate, _writing():
            with self._lock:
                places = self._claim(len(payload))
                self._ordinals = grown(self._ordinals, self._places.touched)
                self._tags = grown(self._tags, self._places.touched)
                ordinals = np.arange(self._writes, self._writes + len(places), dtype=np.uint64)
                self._writes += len(places)
            try:
                tags = self._write(payload.cpu().contiguous().numpy(), places, ordinals)
            except BaseException:
                with self._lock:
                    self._release(places)
                raise
            with self._lock:
                self._ordinals[places] = ordinals
                self._tags[places] = tags
            return torch.from_numpy(places)

    def get(self, places: torch.Tensor) -> torch.Tensor:
        """Raises IntegrityError SW-305: a page is not what was put there last. BackendDown SW-508: the disk failed."""
        wanted = numbers(places)
        with self._gate:
            ordered, back = np.unique(wanted, return_inverse=True)
            with self._lock:
                self._places.check(ordered)
                tags, ordinals = self._tags[ordered], self._ordinals[ordered]
            repeated = len(ordered) < len(wanted)
            rows = np.arange(len(ordered)) if repeated else np.argsort(wanted)
            into = torch.empty(len(ordered), self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            try:
                self._read(ordered, ordinals, tags, into.numpy(), rows)
            except OSError as error:
                raise trouble.broken(error, "read") from error
            return into.index_select(0, torch.from_numpy(back)) if repeated else into

    def retain(self, places: torch.Tensor) -> None:
        with self._gate, self._lock:
            self._places.retain(numbers(places))

    def free(self, places: torch.Tensor) -> None:
        with self._gate, self._lock:
            self._release(numbers(places))

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of pages; alignment is not counted here, only against the capacity."""
        with self._lock:
            return {"disk": self._places.used * self.page_bytes}

    def close(self) -> None:
        if self._gate.close():
            self._pool.shutdown()
            self._file.close()
            self._cipher = None
            self._budget.give(self._places.used * self.extent_bytes)
            self._places = StorePlaces(0)

    def _claim(self, count: int) -> Numbers:
        nbytes = count * self.extent_bytes
        if not self._budget.take(nbytes):
            raise trouble.limit("disk", self._budget.limit)
        try:
            self._reserve(self._places.reach(count))
        except BaseException:
            self._budget.give(nbytes)
            raise
        return self._places.take(count)

    def _release(self, places: Numbers) -> None:
        gone = self._places.free(places)
        if not self._places.used and self._reserved:  # no read or write is under way: those need a place with an owner
            with contextlib.suppress(OSError):  # the space stays with the file then
                self._file.clear()
                self._reserved = 0
            self._ordinals, self._tags = self._ordinals[:0].copy(), self._tags[:0].copy()
        self._budget.give(len(gone) * self.extent_bytes)

    def _reserve(self, extents: int) -> None:
        needed = extents * self.extent_bytes
        if needed <= self._reserved:
            return
        most = needed + self._budget.left // self.extent_bytes * self.extent_bytes
        ahead = min(most, max(needed, self._reserved + STEP))
        try:
            self._file.reserve(self._reserved, ahead - self._reserved)
        except OSError as error:
            if error.errno not in trouble.FULL or ahead == needed:
                raise
            ahead = needed
            self._file.reserve(self._reserved, ahead - self._reserved)
        self._reserved = ahead

    def _write(self, payload: Bytes, places: Numbers, ordinals: np.ndarray) -> Bytes:
        """Seals and writes pages; returns the tags."""
        assert self._cipher is not None
        encrypt, page, extent = self._cipher.encrypt_into, self.page_bytes, self.extent_bytes
        tags = bytearray(TAG * len(places))
        offsets, nonces = (places * extent).tolist(), _nonces(ordinals)
        plain = payload.reshape(-1).data

        def write(share: list[Run]) -> None:
            for start, end in share:
                nbytes = (end - start) * extent
                with self._staging.lend(nbytes + TAG) as buffer:
                    sealed, at = buffer.data, 0
                    for i in range(start, end):  # ascending: the next page takes the place of this one's tag
                        nonce = nonces[i * NONCE : (i + 1) * NONCE]
                        encrypt(nonce, plain[i * page : (i + 1) * page], None, sealed[at : at + page + TAG])
                        tags[i * TAG : (i + 1) * TAG] = sealed[at + page : at + page + TAG]
                        at += extent
                    self._file.write(sealed[:nbytes], offsets[start])

        self._spread(write, runs(places * extent, extent, 0))
        return np.frombuffer(tags, np.uint8).reshape(-1, TAG)

    def _read(self, places: Numbers, ordinals: np.ndarray, tags: Bytes, into: Bytes, rows: Numbers) -> None:
        """Reads and opens the pages at `places`, ascending, the i-th into row `rows[i]`."""
        assert self._cipher is not None
        decrypt, page, extent = self._cipher.decrypt_into, self.page_bytes, self.extent_bytes
        offsets, nonces, known, to = (places * extent).tolist(), _nonces(ordinals), tags.tobytes(), rows.tolist()
        plain = into.reshape(-1).data

        def read(share: list[Run]) -> int:
            total = 0
            for start, end in share:
                first = offsets[start]
                nbytes = offsets[end - 1] + extent - first
                with self._staging.lend(nbytes + TAG) as buffer:
                    sealed = buffer.data
                    if self._file.read(sealed[:nbytes], first) < nbytes:
                        raise trouble.damaged(end - start, "the file ends before it")
                    total += nbytes
                    for i in range(end - 1, start - 1, -1):  # descending: a tag takes the place of what is open already
                        at, row = offsets[i] - first, to[i] * page
                        sealed[at + page : at + page + TAG] = known[i * TAG : (i + 1) * TAG]
                        nonce = nonces[i * NONCE : (i + 1) * NONCE]
                        try:
                            decrypt(nonce, sealed[at : at + page + TAG], None, plain[row : row + page])
                        except InvalidTag:
                            raise trouble.damaged(1, "it was changed, moved or put back in the file") from None
            return total

        total = sum(self._spread(read, runs(places * extent, extent, GAP)))
        with self._lock:
            self.bytes_read += total

    def _spread(self, work: Callable[[list[Run]], T], found: list[Run]) -> list[T]:
        """Calls `work` for each share of the runs, the first in this thread. No call is still running when it returns,
        even after errors."""
        first, *others = shares(found, self.extent_bytes, self._threads) or [[]]
        pending = [self._pool.submit(work, share) for share in others]
        try:
            return [work(first), *(one.result() for one in pending)]
        finally:
            for one in pending:
                one.cancel()
            wait(pending)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in trouble.FULL:
            raise trouble.full("disk", os.strerror(error.errno)) from error
        raise trouble.broken(error, "written") from error


def _nonces(ordinals: np.ndarray) -> bytes:
    """Nonces of 12 bytes each: four zeros, then the ordinal of the write, big-endian."""
    whole = np.zeros((len(ordinals), NONCE), np.uint8)
    whole[:, NONCE - 8 :] = ordinals.astype(">u8").view(np.uint8).reshape(-1, 8)
    return whole.tobytes()
