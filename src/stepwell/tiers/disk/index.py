"""The place of each block on disk: a map in memory from block ids to segment and page, small enough for 60 M blocks.

One table with linear probing and no tombstones. A key's home is `key * size / 2^64`, which rises with the key: so the
table grows in place, from its upper end down, slice by slice: keys at or above a frontier have their home by the new
size, those below it by the old one, and at every moment it is an ordinary table of a rising hash. No growth copies the
table, holds two of it, or pauses a caller for longer than one slice. Addresses are reserved for the largest number of
blocks, and become memory as slots are first written.

A block costs 16 bytes a slot, at 43 to 65 % of the slots filled, and 8.5 bytes in its segment's list of keys: 33 to 46
bytes, and 256 for each segment (from a thousand blocks on; an empty index has 28 KiB). The table does not shrink, and
a key that was replaced or removed stays in its segment's list until that is dropped: the frames on disk bound both.
"""

from __future__ import annotations

import mmap
import sys
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

ID_BYTES: Final = 32
PAGES: Final = 1 << 16
SEGMENTS: Final = 1 << 32

_U64 = npt.NDArray[np.uint64]
_Slots = npt.NDArray[np.intp]
_Number = TypeVar("_Number", bound=np.integer)

_START = 1024
_PAD = 4096  # slots past the last home, for the run that ends there: random keys need a few hundred
_FILLED = 0.65  # from here on the table grows; while it does, the part not yet moved fills to 0.71 at most
_PACE = 16  # slots moved for each block put while growing
_SLICE = 1024  # slots moved at once for single puts: a tenth of a millisecond
_FEW = 32  # this many are placed faster one by one than together
_ALL = 1 << 32
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
_DICTS = 16
_SEGMENT_BYTES = 256  # an array, its allocator's header, a number and a dict's entry; rounded up


class BlockPlace(NamedTuple):
    """`page`: the block's first page, counted from the start of the segment."""

    segment: int
    page: int


def distinct(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Each value once, in order. `numpy.unique` does the same, but loads modules when it is first asked, which a
    running well that may open no more files cannot."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


class BlockIndex:
    """Index of at most `most` blocks. A new block beyond them raises OverflowError and changes nothing. The constructor
    raises OSError where the system grants too few addresses (vm.overcommit_memory 2).

    A block is known by the first 8 bytes of its id. Ids must be uniformly random, as keyed hashes are. An id that was
    never put is found with a probability of len/2^64, and two with the same 8 bytes replace one another. That
    is harmless: a reader checks the full id in the frame, and a wrong one is a miss.

    No call takes longer than about a millisecond, however many blocks there are, except those over many blocks
    (`put_many`, `remove_many`, `hot`, `drop_segment`): their time grows with the blocks given, or those of the segment.
    """

    def __init__(self, most: int = 1 << 28) -> None:
        self._most = most
        self._count = 0
        # Keys (0: empty) and, in the same slots, values: segment << 32 | page << 1 | used.
        reserved = int(most / _FILLED * 1.5) + 2 * _START + _PAD
        keys, values = _reserve(8 * reserved), _reserve(8 * reserved)
        self._keys, self._values = memoryview(keys).cast("Q"), memoryview(values).cast("Q")
        self._all_keys: _U64 = np.frombuffer(keys, np.uint64)
        self._all_values: _U64 = np.frombuffer(values, np.uint64)
        # Keys whose upper half is at least `_front` live by the size `_high`, others by `_low`, in slots below `_edge`
        # or in the run that goes on from there. `_front` is 0 when nothing is growing.
        self._low = self._high = _START
        self._front = self._edge = 0
        self._due = int(_FILLED * _START)  # the count at which the table begins to grow, or moves its next slice
        # The keys put in each segment, stale ones among them; in several dicts: a large one grows for milliseconds.
        self._listed: list[dict[int, array[int]]] = [{} for _ in range(_DICTS)]
        self._listed_keys = self._segments = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, rounded up. A growing table counts with its new size from the start."""
        pages = -(-8 * self._high // mmap.PAGESIZE) + 1  # one for the run at the end
        table = 2 * pages * mmap.PAGESIZE
        listed = self._listed_keys * 8 + self._listed_keys // 2  # an array has at most a sixteenth to spare
        return table + listed + self._segments * _SEGMENT_BYTES + _DICTS * sys.getsizeof({0: 0})

    def find(self, block_id: bytes, use: bool = False) -> BlockPlace | None:
        """The block's place; None: it is not here. `use` marks it as used."""
        key = int.from_bytes(block_id[:8], "little") or 1
        half = key >> 32
        slot = half * (self._high if half >= self._front else self._low) >> 32
        keys = self._keys
        while (found := keys[slot]) != key:
            if not found:
                return None
            slot += 1
        value = self._values[slot]
        if use:
            self._values[slot] = value | 1
        return BlockPlace(value >> 32, (value & 0xFFFFFFFF) >> 1)

    def touch(self, block_id: bytes) -> None:
        """Marks a block as used, if it is here."""
        self.find(block_id, use=True)

    def put(self, block_id: bytes, segment: int, page: int) -> None:
        """Sets the block's place, in place of an earlier one, and marks it as unused."""
        _check(segment, page)
        key = _key(block_id)
        self._put(key, segment << 32 | page << 1)
        self._list(segment, 1).append(key)
        if self._count >= self._due:
            self._grow(_SLICE)

    def put_many(self, ids: bytes | npt.NDArray[np.uint8], segment: int, pages: npt.NDArray[np.uint32]) -> None:
        """`put` for many blocks of one segment, in order; `ids`: 32 bytes each. About half a microsecond a block.

        Raises OverflowError if there would be too many blocks even if all of these were new.
        """
        keys = _keys(ids)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} blocks")
        if not len(keys):
            return
        _check(segment, int(pages.max()))
        if self._count + len(keys) > self._most:
            raise OverflowError(f"{len(keys)} more blocks than {self._count}, of at most {self._most}")
        while self._count + len(keys) > self._due:
            self._grow(max(_SLICE, _PACE * len(keys)))
        self._write(keys, pages.astype(np.uint64) << np.uint64(1) | np.uint64(segment << 32))
        self._list(segment, len(keys)).frombytes(keys.tobytes())

    def remove(self, block_id: bytes) -> bool:
        """Forgets a block; returns whether it was here."""
        slot = self._slot(_key(block_id))
        keys, values = self._keys, self._values
        if not keys[slot]:
            return False
        # Keys that follow in the run move up into the hole, unless it lies before their home.
        hole, slot = slot, slot + 1
        while key := keys[slot]:
            if self._home(key) <= hole:
                keys[hole], values[hole] = key, values[slot]
                hole = slot
            slot += 1
        keys[hole] = 0
        self._count -= 1
        return True

    def remove_many(self, ids: bytes | npt.NDArray[np.uint8], segment: int, pages: npt.NDArray[np.uint32]) -> int:
        """Forgets those of the blocks that still lie at these pages of this segment; returns how many. About a
        microsecond a block."""
        slots = self._locate(_keys(ids))
        places = pages.astype(np.uint64) | np.uint64(segment << 31)
        here = (slots >= 0) & (self._all_values[slots] >> 1 == places)
        slots = distinct(slots[here])
        self._take_out(slots)
        return len(slots)

    def hot(self, segment: int, ids: Sequence[bytes]) -> list[bool]:
        """For each block, whether it still lies in this segment and was used since it was put there."""
        values = self._all_values[self._locate(_keys(b"".join(ids)))]  # not found: the last one, which is always 0
        here: list[bool] = ((values >> 32 == segment) & (values & 1 == 1)).tolist()
        return here

    def drop_segment(self, segment: int) -> int:
        """Forgets all blocks of this segment; returns how many. About a microsecond a block."""
        listed = self._listed[segment % _DICTS].pop(segment, None)
        if listed is None:
            return 0
        self._segments -= 1
        self._listed_keys -= len(listed)
        slots = self._locate(distinct(np.frombuffer(listed, np.uint64)))
        slots = slots[slots >= 0]
        slots = slots[self._all_values[slots] >> 32 == segment]  # others lie elsewhere by now
        self._take_out(slots)
        return len(slots)

    def _list(self, segment: int, more: int) -> array[int]:
        """The segment's list, to which so many keys are about to be added."""
        lists = self._listed[segment % _DICTS]
        listed = lists.get(segment)
        if listed is None:
            listed = lists[segment] = array("Q")
            self._segments += 1
        self._listed_keys += more
        return listed

    # --- one key ------------------------------------------------------------------------------------------------------

    def _home(self, key: int) -> int:
        half = key >> 32
        return half * (self._high if half >= self._front else self._low) >> 32

    def _slot(self, key: int) -> int:
        """The key's slot, or the empty slot that it would take."""
        slot = self._home(key)
        keys = self._keys
        while (found := keys[slot]) and found != key:
            slot += 1
        return slot

    def _put(self, key: int, value: int) -> None:
        slot = self._slot(key)
        if not self._keys[slot]:
            if self._count >= self._most:
                raise OverflowError(f"more than {self._most} blocks")
            self._keys[slot] = key
            self._count += 1
        self._values[slot] = value

    # --- many keys ----------------------------------------------------------------------------------------------------

    def _homes(self, keys: _U64) -> _Slots:
        half = keys >> 32
        sizes = (
            np.where(half >= self._front, np.uint64(self._high), np.uint64(self._low)) if self._front else self._high
        )
        homes: _Slots = (half * sizes >> 32).astype(np.intp)
        return homes

    def _write(self, keys: _U64, values: _U64) -> None:
        """Advances all keys slot by slot together, until each has found its own or an empty slot. Of equal keys the
        last one counts."""
        all_keys, all_values = self._all_keys, self._all_values
        slots, numbers = self._homes(keys), np.arange(len(keys), dtype=np.uint64)
        while len(keys) > _FEW:
            empty = (all_keys.take(slots) == 0).nonzero()[0]
            taken, rows = slots.take(empty), numbers[: len(empty)]
            all_keys[taken] = keys.take(empty)
            all_values[taken] = rows
            self._count += int(np.count_nonzero(all_values.take(taken) == rows))  # several keys in one slot count once
            settled = all_keys.take(slots) == keys
            done, rest = settled.nonzero()[0], (~settled).nonzero()[0]
            all_values[slots.take(done)] = values.take(done)
            keys, values, slots = keys.take(rest), values.take(rest), slots.take(rest) + 1
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            self._put(key, value)

    def _locate(self, keys: _U64) -> _Slots:
        """The slot of each key; -1: the key is not here."""
        found = np.full(len(keys), -1, np.intp)
        rows, slots = np.arange(len(keys)), self._homes(keys)
        while len(rows) > _FEW:
            held = self._all_keys[slots]
            here = held == keys[rows]
            found[rows[here]] = slots[here]
            on = (~here & (held != 0)).nonzero()[0]
            rows, slots = rows[on], slots[on] + 1
        for row in rows.tolist():
            slot = self._slot(int(keys[row]))
            found[row] = slot if self._keys[slot] else -1
        return found

    def _take_out(self, slots: _Slots) -> None:
        """Empties these slots and puts the keys that follow them in their runs again."""
        all_keys = self._all_keys
        all_keys[slots] = 0
        self._count -= len(slots)
        behind = []
        walk = slots + 1  # each stops at the next hole at the latest: no slot is met twice
        while len(walk):
            walk = walk[all_keys[walk] != 0]
            behind.append(walk)
            walk = walk + 1
        self._again(np.concatenate(behind) if behind else slots)

    def _again(self, slots: _Slots) -> None:
        """Moves the keys of these slots, which reach to the end of their run, to where they belong."""
        keys, values = self._all_keys[slots], self._all_values[slots]
        self._all_keys[slots] = 0
        self._count -= len(slots)
        self._write(keys, values)

    # --- growth -------------------------------------------------------------------------------------------------------

    def _grow(self, slots: int) -> None:
        """Moves the next slice below the frontier, of about this many slots, to its homes by the new size."""
        if not self._front:
            self._low, self._high = self._high, self._high * 3 // 2
            self._front, self._edge = _ALL, self._low
        first, end = max(0, self._edge - slots), self._edge
        while self._keys[end]:  # the run that began below the edge
            end += 1
        self._front, self._edge = -(-(first << 32) // self._low), first
        self._again(first + self._all_keys[first:end].nonzero()[0])
        if self._front:
            self._due = self._count + slots // _PACE
        else:
            self._due = int(_FILLED * self._high)


def _check(segment: int, page: int) -> None:
    if page >> 16 or segment >> 32:
        raise ValueError(f"page {page} of segment {segment}: there are {PAGES} pages in each of {SEGMENTS} segments")


def _key(block_id: bytes) -> int:
    """0 marks an empty slot: an id that begins with it shares the key 1."""
    return int.from_bytes(block_id[:8], "little") or 1


def _keys(ids: bytes | npt.NDArray[np.uint8]) -> _U64:
    rows = np.frombuffer(ids, "<u8") if isinstance(ids, bytes) else np.ascontiguousarray(ids).reshape(-1).view("<u8")
    keys: _U64 = rows[:: ID_BYTES // 8].astype(np.uint64)
    keys[keys == 0] = 1
    return keys


def _reserve(size: int) -> mmap.mmap:
    """Addresses, zero when first read; memory only where something has been written."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
