"""The disk tier's index against a dict, and what it promises about memory and pauses. No timing."""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lab.rig.suite.amount import some_or_many
from stepwell.tiers.disk import index as module
from stepwell.tiers.disk.index import BlockIndex, BlockPlace

SEED = 11


def check_table(index: BlockIndex) -> None:
    """Each key can be reached from its home, no slot is left over, and what is behind the last home is short."""
    keys = index._all_keys[: index._high + module._PAD]
    occupied = keys.nonzero()[0]
    assert len(occupied) == len(index)
    homes = index._homes(keys[occupied])
    assert (homes <= occupied).all()
    empty_before = np.cumsum(keys == 0)
    assert (empty_before[homes] == empty_before[occupied]).all(), "an empty slot between a key and its home"


def ids_of(count: int, seed: int = SEED) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(32) for _ in range(count)]


def put_segment(index: BlockIndex, segment: int, count: int, seed: int = SEED) -> np.ndarray:
    ids = np.random.default_rng((seed, segment)).integers(0, 256, (count, 32), np.uint8)
    index.put_many(ids, segment, np.arange(count, dtype=np.uint32))
    return ids


# --- against a dict ---------------------------------------------------------------------------------------------------

_spread = [number * 0x0123_4567_89AB_CDEF % 2**64 for number in range(1, 150)]
_crowded = [0x8000_0000_0000_0000 + number for number in range(12)]  # all with one home
_edges = [0, 1, 2, 2**32, 2**64 - 1, 2**64 - 2, 2**64 - 2**32]
_heads = [head.to_bytes(8, "little") for head in _spread + _crowded + _edges]
block_ids = st.builds(lambda head, tail: head + tail * 24, st.sampled_from(_heads), st.sampled_from([b"\0", b"x"]))
segments = st.sampled_from([0, 1, 2, 7, 2**32 - 1])
pages = st.integers(0, 65535)


class AgainstADict(RuleBasedStateMachine):
    """Keyed by what the index keeps of an id: two ids with one head are one block here."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(1000)
        self.model: dict[int, tuple[BlockPlace, bool]] = {}

    @rule(block=block_ids, segment=segments, page=pages)
    def put(self, block: bytes, segment: int, page: int) -> None:
        self.index.put(block, segment, page)
        self.model[module._key(block)] = BlockPlace(segment, page), False

    @rule(blocks=st.lists(st.tuples(block_ids, pages), max_size=60), segment=segments, as_array=st.booleans())
    def put_many(self, blocks: list[tuple[bytes, int]], segment: int, as_array: bool) -> None:
        ids = b"".join(block for block, _ in blocks)
        array = np.frombuffer(ids, np.uint8).reshape(-1, 32)
        self.index.put_many(array if as_array else ids, segment, np.array([page for _, page in blocks], np.uint32))
        for block, page in blocks:
            self.model[module._key(block)] = BlockPlace(segment, page), False

    @rule(block=block_ids, use=st.booleans())
    def find(self, block: bytes, use: bool) -> None:
        place, used = self.model.get(module._key(block), (None, False))
        assert self.index.find(block, use) == place
        if place is not None:
            self.model[module._key(block)] = place, used or use

    @rule(block=block_ids)
    def touch(self, block: bytes) -> None:
        self.index.touch(block)
        if known := self.model.get(module._key(block)):
            self.model[module._key(block)] = known[0], True

    @rule(block=block_ids)
    def remove(self, block: bytes) -> None:
        assert self.index.remove(block) == (self.model.pop(module._key(block), None) is not None)

    @rule(blocks=st.lists(st.tuples(block_ids, pages), max_size=60), segment=segments, here=st.booleans())
    def remove_many(self, blocks: list[tuple[bytes, int]], segment: int, here: bool) -> None:
        """Pages and segment are right by chance, or for all that lie in the segment."""
        known = {block: self.model.get(module._key(block), (None,))[0] for block, _ in blocks}
        if here:
            blocks = [(block, place.page) if (place := known[block]) else (block, page) for block, page in blocks]
        expected = {module._key(block) for block, page in blocks if known[block] == (segment, page)}
        ids, at = b"".join(block for block, _ in blocks), np.array([page for _, page in blocks], np.uint32)
        assert self.index.remove_many(ids, segment, at) == len(expected)
        for key in expected:
            del self.model[key]

    @rule(segment=segments)
    def drop_segment(self, segment: int) -> None:
        dropped = [key for key, (place, _) in self.model.items() if place.segment == segment]
        assert self.index.drop_segment(segment) == len(dropped)
        for key in dropped:
            del self.model[key]

    @rule(segment=segments, blocks=st.lists(block_ids, max_size=60))
    def hot(self, segment: int, blocks: list[bytes]) -> None:
        known = [self.model.get(module._key(block)) for block in blocks]
        expected = [entry is not None and entry[0].segment == segment and entry[1] for entry in known]
        assert self.index.hot(segment, blocks) == expected

    @invariant()
    def all_are_found(self) -> None:
        assert len(self.index) == len(self.model)
        for key, (place, _) in self.model.items():
            assert self.index.find(key.to_bytes(8, "little") + b"?" * 24) == place
        check_table(self.index)


@some_or_many("examples", 12, 100)
@pytest.mark.parametrize("few", [2, 32])
def test_it_is_a_dict(few: int, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough that it grows several times, in slices of a few slots, whether keys go together or alone."""
    monkeypatch.setattr(module, "_START", 16)
    monkeypatch.setattr(module, "_SLICE", 4)
    monkeypatch.setattr(module, "_FEW", few)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AgainstADict, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None)
    )


@pytest.mark.parametrize("seed", range(3))
def test_it_is_a_dict_of_thousands(seed: int) -> None:
    """As it is: with long batches, while it grows and while it does not."""
    source, index, model = random.Random(seed), BlockIndex(20_000), dict[bytes, BlockPlace]()
    known = ids_of(12_000, seed)
    for step in range(400):
        segment, batch = source.randrange(30), source.choices(known, k=source.randrange(1, 300))
        numbers = [source.randrange(65536) for _ in batch]
        if source.random() < 0.5:
            index.put_many(b"".join(batch), segment, np.array(numbers, np.uint32))
        else:
            for block, page in zip(batch, numbers, strict=True):
                index.put(block, segment, page)
        model.update((block, BlockPlace(segment, page)) for block, page in zip(batch, numbers, strict=True))
        for block in source.choices(known, k=20):
            assert index.remove(block) == (model.pop(block, None) is not None)
        some = source.choices(known, k=200)
        numbers = [model[block].page if block in model else 7 for block in some]
        gone = {block for block in some if block in model and model[block].segment == segment}
        assert index.remove_many(b"".join(some), segment, np.array(numbers, np.uint32)) == len(gone)
        for block in gone:
            del model[block]
        if step % 20 == 19:
            dropped = [block for block, place in model.items() if place.segment == segment]
            assert index.drop_segment(segment) == len(dropped) > 0
            for block in dropped:
                del model[block]
            assert all(index.find(block) == model.get(block) for block in known)
            check_table(index)
    assert len(index) == len(model)


# --- what is kept of an id --------------------------------------------------------------------------------------------


def test_ids_with_the_same_first_bytes_replace_one_another() -> None:
    index = BlockIndex(10)
    index.put(b"12345678" + b"a" * 24, 1, 10)
    index.put(b"12345678" + b"b" * 24, 2, 20)
    assert len(index) == 1
    assert index.find(b"12345678" + b"a" * 24) == (2, 20)


def test_an_id_that_begins_with_the_mark_of_an_empty_slot() -> None:
    index = BlockIndex(10)
    zero = bytes(32)
    assert index.find(zero) is None and not index.remove(zero)
    index.put(zero, 3, 4)
    assert index.find(zero) == (3, 4) and len(index) == 1
    assert index.drop_segment(3) == 1 and index.find(zero) is None
    index.put_many(zero, 5, np.array([6], np.uint32))
    assert index.find(zero, use=True) == (5, 6) and index.hot(5, [zero]) == [True]
    assert index.remove(zero) and len(index) == 0


# --- use --------------------------------------------------------------------------------------------------------------


def test_only_what_was_used_since_it_was_put_here_is_hot() -> None:
    index = BlockIndex(100)
    found, touched, looked_at, moved, gone = ids_of(5)
    for page, block in enumerate([found, touched, looked_at, moved, gone]):
        index.put(block, 1, page)
    index.find(found, use=True)
    index.touch(touched)
    index.find(looked_at)
    index.touch(moved)
    index.touch(gone)
    index.put(moved, 2, 0)
    index.remove(gone)
    assert index.hot(1, [found, touched, looked_at, moved, gone]) == [True, True, False, False, False]
    assert index.hot(2, [moved]) == [False], "used before, not since"
    index.put(found, 1, 9)
    assert index.hot(1, [found]) == [False]
    assert index.hot(1, []) == []
    assert index.find(touched) == (1, 1), "the mark is no part of the place"


# --- segments ---------------------------------------------------------------------------------------------------------


def test_dropping_a_segment_spares_what_lies_elsewhere_by_now() -> None:
    index = BlockIndex(5000)
    ids = ids_of(1000)
    for page, block in enumerate(ids):
        index.put(block, 1, page)
    for block in ids[:400]:
        index.put(block, 2, 7)
    for block in ids[400:500]:
        index.remove(block)
    for block in ids[500:600]:
        index.put(block, 1, 8)  # a second frame of it in the same segment
    assert index.drop_segment(1) == 500
    assert [index.find(block) for block in ids] == [(2, 7)] * 400 + [None] * 600
    assert index.drop_segment(1) == 0 == index.drop_segment(99)
    assert index.drop_segment(2) == 400 and len(index) == 0


def test_a_segment_of_which_nothing_is_left() -> None:
    index = BlockIndex(5000)
    ids = ids_of(100)
    index.put_many(b"".join(ids), 1, np.arange(100, dtype=np.uint32))
    index.put_many(b"".join(ids), 2, np.arange(100, dtype=np.uint32))
    assert index.drop_segment(1) == 0
    assert len(index) == 100


def test_a_number_of_a_dropped_segment_can_be_used_again() -> None:
    index = BlockIndex(5000)
    old = put_segment(index, 1, 300)
    index.drop_segment(1)
    put_segment(index, 1, 200, SEED + 1)
    assert index.find(old[0].tobytes()) is None
    assert index.drop_segment(1) == 200


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("segment", "page"), [(0, 65536), (0, -1), (2**32, 0), (-1, 0)])
def test_a_place_that_cannot_be(segment: int, page: int) -> None:
    index = BlockIndex(10)
    (block,) = ids_of(1)
    with pytest.raises(ValueError, match=f"page {page} of segment {segment}"):
        index.put(block, segment, page)
    with pytest.raises(ValueError, match=f"page {page % 2**32} of segment {segment}"):
        index.put_many(block, segment, np.array([page % 2**32], np.uint32))
    assert len(index) == 0 and index.find(block) is None and index.nbytes == BlockIndex(10).nbytes


def test_one_page_for_each_block() -> None:
    index = BlockIndex(10)
    with pytest.raises(ValueError, match="1 pages for 2 blocks"):
        index.put_many(b"".join(ids_of(2)), 1, np.array([1], np.uint32))
    assert len(index) == 0


def test_none_at_all() -> None:
    index = BlockIndex(10)
    index.put_many(b"", 1, np.array([], np.uint32))
    assert len(index) == 0 and index.drop_segment(1) == 0


def test_no_more_than_there_may_be() -> None:
    index = BlockIndex(10)
    ids = ids_of(12)
    index.put_many(b"".join(ids[:9]), 1, np.arange(9, dtype=np.uint32))
    with pytest.raises(OverflowError):
        index.put_many(b"".join(ids[9:11]), 1, np.arange(2, dtype=np.uint32))
    assert len(index) == 9 and index.find(ids[9]) is None
    index.put(ids[9], 1, 9)
    before = index.nbytes
    with pytest.raises(OverflowError):
        index.put(ids[10], 1, 10)
    assert len(index) == 10 and index.nbytes == before
    index.put(ids[3], 2, 5)  # no new one
    assert index.find(ids[3]) == (2, 5) and index.find(ids[10]) is None
    index.remove(ids[0])
    index.put(ids[10], 1, 10)
    assert index.find(ids[10]) == (1, 10)


@pytest.mark.parametrize("most", [0, 1, 665, 666, 30_000])
def test_as_many_as_there_may_be_have_a_place(most: int) -> None:
    index = BlockIndex(most)
    ids = ids_of(most)
    for page, block in enumerate(ids):
        index.put(block, 1, page % 65536)
    assert all(index.find(block) for block in ids)
    check_table(index)
    assert len(index._all_keys) >= index._high + module._PAD, "room for the run at the end"


# --- memory -----------------------------------------------------------------------------------------------------------


def filling(index: BlockIndex, most: int, batch: int) -> Iterator[int]:
    """Segment by segment; yields after each."""
    segment = 0
    while len(index) < most:
        put_segment(index, segment, batch)
        segment += 1
        yield len(index)


@pytest.mark.parametrize(("most", "batch"), [(20_000, 100), (300_000, 500), (2_000_000, 30_000)])
def test_a_block_costs_at_most_64_bytes(most: int, batch: int) -> None:
    """At any fill from a thousand on: while the table grows, right after it, and right before it grows again."""
    index = BlockIndex(most + batch)
    costs = [index.nbytes / count for count in filling(index, most, batch) if count >= 1000]
    assert 32 < max(costs) <= 64
    assert min(costs) <= 40


def test_what_is_told_covers_what_is_held() -> None:
    index = BlockIndex(200_000)
    for count in filling(index, 100_000, 500):
        highest = int(index._all_keys[: index._high + module._PAD].nonzero()[0].max())
        listed = sum(sys.getsizeof(lists) for lists in index._listed)
        listed += sum(
            sys.getsizeof(keys) + sys.getsizeof(number) for lists in index._listed for number, keys in lists.items()
        )
        assert 16 * (highest + 1) + listed <= index.nbytes, count


def test_dropping_a_segment_gives_back_its_list() -> None:
    index = BlockIndex(10_000)
    empty = index.nbytes
    for segment in range(50):
        put_segment(index, segment, 10)
        index.put(ids_of(1)[0], segment, 3)
    assert index.nbytes > empty
    largest = max(len(lists) for lists in index._listed)
    assert largest <= 4, "a dict of all segments would hold up a put for long when it grows"
    for segment in range(50):
        index.drop_segment(segment)
    assert index.nbytes == empty


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text() == "2\n", reason="addresses count as memory on this system"
)
def test_memory_is_taken_as_it_is_needed() -> None:
    """Room for more blocks than there is memory for is no memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    before = _resident()
    index = BlockIndex(memory // 8)
    put_segment(index, 0, 1000)
    assert _resident() - before < 64 << 20
    assert index.nbytes < 64_000


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_coming_and_going_does_not_fill_the_table() -> None:
    """A full disk's life: a segment is written, the oldest dropped. Removed blocks leave nothing behind."""
    index = BlockIndex(50_000)
    for segment in range(20):
        put_segment(index, segment, 300)
    size = index.nbytes
    for segment in range(20, 400):
        assert index.drop_segment(segment - 20) > 0
        ids = put_segment(index, segment, 300)
        for row in ids[:50]:
            index.remove(row.tobytes())
            index.put(row.tobytes(), segment, 1)
    assert len(index) == 20 * 300
    check_table(index)
    assert index._high == 11664, "the size that 6,000 blocks need, after 120,000 have come and gone"
    assert index.nbytes - size < 20 * 60 * 8, "lists hold what was put twice, until their segment goes"


# --- growth -----------------------------------------------------------------------------------------------------------


def test_a_put_moves_one_slice_at_most_and_growth_ends_in_time() -> None:
    index, moved, growths = BlockIndex(1 << 17), [], 0
    for number, block in enumerate(ids_of(100_000)):
        was_growing, edge = index._front > 0, index._edge
        index.put(block, 1, number % 65536)
        if was_growing:
            moved.append(edge - index._edge)
            if not index._front:
                growths += 1
                assert len(index) < 0.73 * index._low, "long before the smaller table would have been full"
        if number % 5000 == 0:
            check_table(index)
    assert growths >= 8
    assert 0 < max(moved) <= module._SLICE


def test_a_key_just_below_the_frontier_is_not_taken_for_one_above() -> None:
    index = BlockIndex(10_000)
    below = (0x55555555 << 32 | 5).to_bytes(8, "little") + bytes(24)  # a third, rounded down: home 511 of 1536
    index.put(below, 1, 1)
    for block in ids_of(2000):
        index.put(block, 1, 0)
        if (index._low, index._edge) == (1536, 512):
            break
    assert index._low == 1536 and index._edge == 512
    assert index.find(below) == (1, 1)


def test_what_is_found_while_the_table_grows() -> None:
    index = BlockIndex(100_000)
    ids = ids_of(20_000)
    between = 0
    for number, block in enumerate(ids):
        index.put(block, number // 1000, number % 1000)
        if index._front and number % 97 == 0:
            between += 1
            for at in range(0, number + 1, 7):
                assert index.find(ids[at]) == (at // 1000, at % 1000)
    assert between > 5


def test_forgetting_needs_nothing_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's own `unique` loads modules when it is first asked: a well without descriptors ended by that."""
    index = BlockIndex(1000)
    dice = random.Random(SEED)
    ids = [dice.randbytes(32) for _ in range(100)]
    for page, id in enumerate(ids):
        index.put(id, 1, page)
    monkeypatch.delattr(np, "unique")
    assert index.remove_many(b"".join(ids[:10] + ids[:10]), 1, np.array([*range(10)] * 2, np.uint32)) == 10
    assert index.drop_segment(1) == 90
