"""A frame opens as what it is and as nothing else; what does not open leaves zeros."""

from __future__ import annotations

import dataclasses
import random
import zlib

import numpy as np
import pytest

import golden
from stepwell.block.frame import AES_256_GCM, CHUNK, PLAIN, TAG, FrameHeader, frame_bytes, frame_parts
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import NO_COMMITMENT, ExpectedFrame, Opened, SegmentKey, expected_of, seal, unseal
from stepwell.io.memory import Bytes
from stepwell.vault.keyring import Epoch

END = PAGE + golden.PAYLOAD + TAG
BLOCK = golden.ORIGIN.name(golden.digest(0))
EXPECTED = ExpectedFrame(golden.SEGMENT, BLOCK, golden.ORIGIN.tag, 0, golden.SHARDS, golden.PAYLOAD)
INTO = np.empty(golden.PAYLOAD, np.uint8)


def opened(
    frame: Bytes,
    expected: ExpectedFrame = EXPECTED,
    key: SegmentKey | None = None,
    *,
    sealed: bool,
    now: int = golden.NOW,
) -> Opened:
    """Also: nothing is left behind unless it is GOOD, and then it is what was written."""
    INTO[:] = 0xEE
    verdict = unseal(frame, expected, key or golden.key(), INTO, sealed=sealed, now=now)
    if verdict is Opened.GOOD:
        assert (golden.payload(0, 0) == INTO).all()
    else:
        assert not INTO.any(), "what failed is wiped"
    return verdict


@pytest.mark.parametrize("sealed", [True, False])
def test_every_flipped_bit_is_refused(sealed: bool) -> None:
    frame = golden.frame(sealed=sealed)
    for at in range(len(frame)):
        for bit in range(8):
            frame[at] ^= 1 << bit
            verdict = opened(frame, sealed=sealed)
            assert verdict is not Opened.GOOD, "padding, too, is what it should be"
            frame[at] ^= 1 << bit
    assert opened(frame, sealed=sealed) is Opened.GOOD


@pytest.mark.parametrize("sealed", [True, False])
def test_every_flipped_bit_of_a_header_with_the_right_checksum_is_refused(sealed: bool) -> None:
    frame = golden.frame(sealed=sealed)
    page = frame[:PAGE].tobytes()
    changed = 0
    for bit in range(8 * 200):
        mutant = bytearray(page)
        mutant[bit // 8] ^= 1 << bit % 8
        header = FrameHeader.parse(_checked(bytes(mutant)))
        changed += header is not None
        frame[:PAGE] = np.frombuffer(_checked(bytes(mutant)), np.uint8)
        assert opened(frame, sealed=sealed) is not Opened.GOOD
    assert changed > 900, "most of them are headers that could have been written"


def _checked(page: bytes) -> bytes:
    return page[:-4] + zlib.crc32(page[:-4]).to_bytes(4, "little")


@pytest.mark.parametrize("sealed", [True, False])
def test_every_truncation_is_refused(sealed: bool) -> None:
    frame = golden.frame(sealed=sealed)
    for length in range(len(frame)):
        assert opened(frame[:length], sealed=sealed) is Opened.DAMAGED
        padded = np.concatenate([frame[:length], np.zeros(len(frame) - length, np.uint8)])
        if (padded != frame).any():
            assert opened(padded, sealed=sealed) is Opened.DAMAGED


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FrameHeader)])
def test_every_field_is_bound_to_the_payload(field: str, sealed: bool) -> None:
    """A header that says something else, over the same payload and tag, with what it says expected of it."""
    frame = golden.frame(sealed=sealed)
    header = golden.header(0, 0, sealed=sealed)
    value = getattr(header, field)
    changed = value[:-1] + bytes([value[-1] ^ 1]) if isinstance(value, bytes) else value + 1
    other = dataclasses.replace(header, **{field: changed})
    frame[:PAGE] = np.frombuffer(other.pack(), np.uint8)
    expected = dataclasses.replace(expected_of(other), payload=golden.PAYLOAD)
    key = SegmentKey(golden.key().key, other.commitment)
    assert opened(frame, expected, key, sealed=sealed, now=0) is not Opened.GOOD
    assert opened(frame, sealed=sealed) is not Opened.GOOD


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"segment": b"another segment "}, Opened.STALE),
        ({"block": golden.ORIGIN.name(golden.digest(1))}, Opened.FOREIGN),
        ({"namespace": b"another model..."}, Opened.FOREIGN),
        ({"shard": 1}, Opened.FOREIGN),
        ({"shards": 3}, Opened.FOREIGN),
        ({"payload": golden.PAYLOAD - 1}, Opened.FOREIGN),
        ({"group": 1}, Opened.FOREIGN),
        ({"codec": 1}, Opened.FOREIGN),
        ({"parameters": b"p" * 16}, Opened.FOREIGN),
    ],
    ids=["segment", "block", "namespace", "shard", "shards", "length", "group", "codec", "parameters"],
)
def test_it_opens_only_as_what_it_is(change: dict[str, bytes | int], verdict: Opened, sealed: bool) -> None:
    frame = golden.frame(sealed=sealed)
    expected = dataclasses.replace(EXPECTED, **change)  # type: ignore[arg-type]
    assert opened(frame, expected, sealed=sealed) is verdict


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1)], ids=["shard", "block", "both"])
def test_frames_that_changed_places_are_refused(other: tuple[int, int], sealed: bool) -> None:
    assert opened(golden.frame(*other, sealed=sealed), sealed=sealed) is Opened.FOREIGN
    spliced = golden.frame(sealed=sealed)
    spliced[PAGE:] = golden.frame(*other, sealed=sealed)[PAGE:]
    assert opened(spliced, sealed=sealed) is Opened.DAMAGED


@pytest.mark.parametrize("epoch", [Epoch(1, b"another tenant's key, 32 bytes.."), Epoch(2, bytes(32))])
def test_other_keys_are_refused_before_anything_is_decrypted(epoch: Epoch) -> None:
    other = SegmentKey(*epoch.segment_key(golden.SEGMENT))
    assert opened(golden.frame(sealed=True), key=other, sealed=True) is Opened.FOREIGN
    lying = SegmentKey(other.key, golden.key().commitment)
    assert opened(golden.frame(sealed=True), key=lying, sealed=True) is Opened.DAMAGED


def test_a_key_is_of_one_segment() -> None:
    """The same tenant's key for another segment neither commits nor opens."""
    other = golden.key(b"another segment ")
    assert opened(golden.frame(sealed=True), key=other, sealed=True) is Opened.FOREIGN
    lying = SegmentKey(other.key, golden.key().commitment)
    assert opened(golden.frame(sealed=True), key=lying, sealed=True) is Opened.DAMAGED


def test_a_plain_frame_is_refused_where_frames_are_sealed() -> None:
    assert opened(golden.frame(sealed=False), sealed=True) is Opened.FOREIGN
    assert opened(golden.frame(sealed=False), sealed=False) is Opened.GOOD


def test_a_sealed_frame_opens_where_frames_may_be_plain() -> None:
    assert opened(golden.frame(sealed=True), sealed=False) is Opened.GOOD


def test_a_plain_frame_commits_to_no_key() -> None:
    header = dataclasses.replace(golden.header(0, 0, sealed=False), commitment=golden.key().commitment)
    frame = np.empty(frame_bytes(golden.PAYLOAD), np.uint8)
    seal(header, None, golden.payload(0, 0), frame)
    assert opened(frame, sealed=False) is Opened.FOREIGN
    assert golden.header(0, 0, sealed=False).commitment == NO_COMMITMENT


@pytest.mark.parametrize("algorithm", [PLAIN, AES_256_GCM])
def test_what_has_expired_is_not_opened(algorithm: int) -> None:
    sealed = algorithm == AES_256_GCM
    header = dataclasses.replace(golden.header(0, 0, sealed=sealed), expires=golden.NOW)
    frame = np.empty(frame_bytes(golden.PAYLOAD), np.uint8)
    seal(header, golden.key() if sealed else None, golden.payload(0, 0), frame)
    assert opened(frame, sealed=sealed, now=golden.NOW - 1) is Opened.GOOD
    assert opened(frame, sealed=sealed, now=golden.NOW) is Opened.STALE


def test_nothing_of_the_payload_shows_in_a_sealed_frame() -> None:
    frame = golden.frame(sealed=True).tobytes()
    plain = golden.payload(0, 0).tobytes()
    assert not any(plain[at : at + 8] in frame for at in range(0, golden.PAYLOAD, 8))
    assert not golden.frame(sealed=True)[END:].any(), "what was in the buffer before does not leave with it"


# frames of several chunks ---------------------------------------------------------------------------------------------

LARGE = 2 * CHUNK + 100


def _large(*, sealed: bool) -> tuple[Bytes, Bytes, ExpectedFrame, SegmentKey]:
    """A frame of three chunks, its payload, what to expect of it and its key."""
    payload = np.frombuffer(random.Random(7).randbytes(LARGE), np.uint8)
    key = golden.key()
    header = dataclasses.replace(
        golden.header(0, 0, sealed=sealed), payload=LARGE, raw=LARGE, nonce=b"\1\2\3\4" + (2**64 - 9).to_bytes(8, "big")
    )
    frame = np.full(frame_bytes(LARGE), 0xEE, np.uint8)
    seal(header, key if sealed else None, payload, frame)
    expected = ExpectedFrame(header.segment, header.block, header.namespace, header.shard, header.shards, LARGE)
    return frame, payload, expected, key


def _opened(frame: Bytes, expected: ExpectedFrame, key: SegmentKey, *, sealed: bool) -> tuple[Opened, Bytes]:
    into = np.full(LARGE, 0xAA, np.uint8)
    return unseal(frame, expected, key, into, sealed=sealed, now=golden.NOW), into


@pytest.mark.parametrize("sealed", [True, False])
def test_a_frame_of_several_chunks_opens_as_what_it_was(sealed: bool) -> None:
    frame, payload, expected, key = _large(sealed=sealed)
    assert len(frame_parts(LARGE)) == 3
    assert all(part % PAGE == 0 for part in frame_parts(LARGE))
    verdict, into = _opened(frame, expected, key, sealed=sealed)
    assert verdict is Opened.GOOD
    assert (into == payload).all()


@pytest.mark.parametrize("sealed", [True, False])
def test_chunks_are_not_exchanged_or_damaged(sealed: bool) -> None:
    frame, _, expected, key = _large(sealed=sealed)
    second = frame_parts(LARGE)[0]
    swapped = frame.copy()
    swapped[PAGE:second] = frame[second : second + CHUNK + TAG]  # chunk 1 twice, each with its own tag
    verdict, into = _opened(swapped, expected, key, sealed=sealed)
    assert verdict is Opened.DAMAGED
    assert not into.any(), "wiped, those that had been good before too"
    for at in (PAGE, second - 1, second, len(frame) - 1, len(frame) - PAGE + 99, len(frame) - PAGE + 100):
        flipped = frame.copy()
        flipped[at] ^= 1
        verdict, into = _opened(flipped, expected, key, sealed=sealed)
        assert verdict is Opened.DAMAGED
        assert not into.any()
    for end in (PAGE, second, second + 5, len(frame) - PAGE):
        assert _opened(frame[:end], expected, key, sealed=sealed)[0] is Opened.DAMAGED
