"""Headers of frames, heads and footers of segments: what is not what was written is refused, and nothing raises."""

from __future__ import annotations

import dataclasses
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import golden
from stepwell.block.frame import MAX_PAYLOAD, MAX_SHARDS, TAG, FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import ExpectedFrame, Opened, unseal
from stepwell.tiers.disk.layout import MAX_KEYS, RECORD, Footer, Head, OtherVersion, Trailer

HEADER = golden.header(0, 0, sealed=True)
FOOTER = Footer(
    golden.SEGMENT,
    np.array([(bytes([n]) * 32, b"n" * 16, 1 + 4 * n, 4, n % 2, n) for n in range(3)], RECORD),
    (b"a" * 32, b"b" * 32),
)
SEGMENT_PAGES = 100


def checked(page: bytes) -> bytes:
    """With the checksum that belongs to it."""
    return page[:-4] + zlib.crc32(page[:-4]).to_bytes(4, "little")


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def read_footer(data: bytes) -> Footer | None:
    trailer = Trailer.parse(data[-PAGE:])
    if trailer is None or trailer.nbytes > len(data) - PAGE:
        return None
    return trailer.footer(data[len(data) - PAGE - trailer.nbytes : -PAGE], SEGMENT_PAGES)


def test_a_header_reads_back() -> None:
    assert FrameHeader.parse(HEADER.pack()) == HEADER
    assert len(HEADER.pack()) == PAGE


@pytest.mark.parametrize(("payload", "nbytes"), [(1, 2), (PAGE - TAG, 2), (PAGE - TAG + 1, 3), (PAGE, 3)])
def test_frames_are_whole_pages(payload: int, nbytes: int) -> None:
    assert frame_bytes(payload) == nbytes * PAGE


def test_every_flipped_bit_and_every_truncation_of_a_header_is_refused() -> None:
    page = HEADER.pack()
    assert all(FrameHeader.parse(flipped(page, bit)) is None for bit in range(8 * PAGE))
    assert all(FrameHeader.parse(page[:length]) is None for length in range(PAGE))
    assert FrameHeader.parse(page + b"\0") is None


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 2},
        {"shards": MAX_SHARDS + 1},
        {"shards": 0},
        {"payload": 0, "raw": 0},
        {"payload": MAX_PAYLOAD + 1, "raw": MAX_PAYLOAD + 1},
        {"raw": golden.PAYLOAD + 1},
        {"algorithm": 2},
        {"expires": 1 << 32},
        {"codec": 65535},
        {"parameters": b"p" * 16},
        {"position": 1 << 32},
    ],
    ids=str,
)
def test_what_no_writer_says_is_refused(change: dict[str, int]) -> None:
    assert FrameHeader.parse(dataclasses.replace(HEADER, **change).pack()) is None


def test_bytes_that_mean_nothing_yet_are_zeros() -> None:
    page = HEADER.pack()
    version, flags, beyond = 8, 11, 200
    for at in (0, version, flags, beyond, PAGE - 5):
        assert FrameHeader.parse(checked(flipped(page, 8 * at))) is None


def opens_only_as_it_was(changes: list[tuple[int, int]], *, right: bool) -> None:
    """180 bytes hold all fields. Whatever they say, only the very same header opens. `right`: its checksum."""
    frame = golden.frame(sealed=True)
    page = bytearray(frame[:PAGE].tobytes())
    for at, value in changes:
        page[at] = value
    if right:
        page[:] = checked(bytes(page))
    same = bytes(page) == frame[:PAGE].tobytes()
    frame[:PAGE] = np.frombuffer(bytes(page), np.uint8)
    into = np.empty(golden.PAYLOAD, np.uint8)
    expected = ExpectedFrame(golden.SEGMENT, HEADER.block, HEADER.namespace, 0, golden.SHARDS, golden.PAYLOAD)
    verdict = unseal(frame, expected, golden.key(), into, sealed=True, now=golden.NOW)
    assert (verdict is Opened.GOOD) == same
    assert same or not into.any()


@given(st.lists(st.tuples(st.integers(0, 179), st.integers(0, 255)), max_size=12), st.booleans())
def test_no_header_makes_a_reader_raise(changes: list[tuple[int, int]], right: bool) -> None:
    opens_only_as_it_was(changes, right=right)


def test_what_a_header_claims_is_not_allocated() -> None:
    frame = golden.frame(sealed=True)
    huge = dataclasses.replace(HEADER, payload=MAX_PAYLOAD, raw=MAX_PAYLOAD)
    frame[:PAGE] = np.frombuffer(huge.pack(), np.uint8)
    into = np.empty(golden.PAYLOAD, np.uint8)
    expected = ExpectedFrame(golden.SEGMENT, HEADER.block, HEADER.namespace, 0, golden.SHARDS, MAX_PAYLOAD)
    tracemalloc.start()
    try:
        assert unseal(frame, expected, golden.key(), into, sealed=True, now=golden.NOW) is Opened.DAMAGED
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# segments -------------------------------------------------------------------------------------------------------------


def test_a_head_reads_back_and_every_flipped_bit_is_refused() -> None:
    head = Head(golden.SEGMENT, 5, 16 << 20, golden.CREATED)
    page = head.pack()
    assert Head.parse(page) == head
    assert all(Head.parse(flipped(page, bit)) is None for bit in range(8 * PAGE))
    assert all(Head.parse(page[:length]) is None for length in range(PAGE))


@pytest.mark.parametrize("kind", [Head, Trailer])
def test_another_version_says_so(kind: type[Head] | type[Trailer]) -> None:
    page = Head(golden.SEGMENT, 5, 16 << 20, golden.CREATED).pack() if kind is Head else FOOTER.pack()[-PAGE:]
    newer = bytearray(page)
    newer[8:10] = (3).to_bytes(2, "little")
    with pytest.raises(OtherVersion):
        kind.parse(checked(bytes(newer)))
    assert kind.parse(bytes(newer)) is None, "a damaged page says nothing"


def test_a_head_is_no_trailer_and_neither_is_a_frame() -> None:
    head, trailer = Head(golden.SEGMENT, 5, 16 << 20, golden.CREATED).pack(), FOOTER.pack()[-PAGE:]
    assert Head.parse(trailer) is None
    assert Trailer.parse(head) is None
    assert Head.parse(HEADER.pack()) is None
    assert FrameHeader.parse(head) is None


def test_a_footer_reads_back() -> None:
    read = read_footer(FOOTER.pack())
    assert read is not None
    assert (read.segment, read.commitments) == (FOOTER.segment, FOOTER.commitments)
    assert (read.records == FOOTER.records).all()
    assert len(FOOTER.pack()) == Footer.nbytes(3) == 2 * PAGE


def test_every_flipped_bit_of_a_footer_is_refused() -> None:
    data = FOOTER.pack()
    for bit in range(8 * len(data)):
        assert read_footer(flipped(data, bit)) is None, bit


def test_every_truncation_of_a_footer_is_refused() -> None:
    data = FOOTER.pack()
    for length in range(len(data)):
        assert read_footer(data[:length]) is None
        assert read_footer(data[:length] + bytes(len(data) - length)) is None


@pytest.mark.parametrize(
    "record",
    [(0, 1, 0), (SEGMENT_PAGES, 1, 0), (SEGMENT_PAGES - 1, 2, 0), (1, 0, 0), (1, 1, 2), (2**32 - 1, 2**32 - 1, 0)],
    ids=str,
)
def test_records_that_do_not_fit_are_refused(record: tuple[int, int, int]) -> None:
    """A footer is no frame: anybody could have made its checksum."""
    page, pages, key = record
    rows = np.array([(b"b" * 32, b"n" * 16, page, pages, key, 0)], RECORD)
    assert read_footer(Footer(golden.SEGMENT, rows, FOOTER.commitments).pack()) is None


def test_a_trailer_that_claims_too_much_is_refused() -> None:
    page = bytearray(FOOTER.pack()[-PAGE:])
    for at, size, value in ((32, 8, 2**40), (40, 8, 2 * PAGE), (64, 4, MAX_KEYS + 1)):
        changed = page.copy()
        changed[at : at + size] = value.to_bytes(size, "little")
        assert Trailer.parse(checked(bytes(changed))) is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_trailer_that_claims_too_little_is_refused(count: int) -> None:
    """Blocks would be hidden, and their pages given away."""
    data = bytearray(FOOTER.pack())
    data[PAGE + 32 : PAGE + 40] = count.to_bytes(8, "little")
    assert read_footer(bytes(data[:PAGE]) + checked(bytes(data[PAGE:]))) is None


@example([(32, 1)])
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=12))
def test_no_trailer_makes_a_reader_raise(changes: list[tuple[int, int]]) -> None:
    data = bytearray(FOOTER.pack())
    for at, value in changes:
        data[PAGE + at] = value
    data[PAGE:] = checked(bytes(data[PAGE:]))
    try:
        read = read_footer(bytes(data))
    except OtherVersion:
        return
    assert read is None or len(read.records) == 3
