"""What a well makes, and not only the code beneath, is what lies in the golden files."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3

import golden
from stepwell.block.frame import CHUNK, FrameHeader, frame_bytes
from stepwell.block.layout import PAGE, SlabLayout
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.memory import SystemMemory
from stepwell.tiers.base import Place, Reading

RANDOM = b"\1\2\3\4"
FRAMES = golden.SHARDS * frame_bytes(golden.PAYLOAD)


def sealing(*, sealed: bool = True) -> Sealing:
    return Sealing(golden.KEYRING, sealed=sealed, wall=lambda: golden.CREATED, entropy=lambda nbytes: RANDOM[:nbytes])


def entry(by: Sealing, block: int, nbytes: int = golden.PAYLOAD) -> Entry:
    """The block in an arena, its slots not filled."""
    layout = SlabLayout(nbytes, golden.SHARDS)
    slab = Slab(1, Owner("default", b"m" * 32, nbytes), layout, SystemMemory().make(layout.nbytes))
    (origin,) = by.origins("default", golden.NAMESPACE)
    made = Entry(origin.name(golden.digest(block)), tuple((slab, n) for n in range(golden.SHARDS)), None)
    made.origin, made.position = origin, block
    return made


def frames(block: int, nbytes: int = golden.PAYLOAD, *, sealed: bool = True) -> bytes:
    """As a tier that gives each part a number has them made; block n is the n-th in its segment."""
    by = sealing(sealed=sealed)
    full = entry(by, block, nbytes)
    for shard, (slab, slot) in enumerate(full.slots):
        slab.payload(slot)[:] = golden.payload(block, shard, nbytes)
    outgoing = by.outgoing(full)
    parts = [np.full(length, 0xEE, np.uint8) for length in outgoing.parts]
    for part, into in enumerate(parts):
        outgoing.make(part, into, Place(golden.SEGMENT, block * len(parts)))
    return b"".join(part.tobytes() for part in parts)


def test_a_well_makes_the_frames_of_the_golden_segment() -> None:
    segment = (golden.FOLDER / "closed-2.seg").read_bytes()
    for block in range(golden.BLOCKS):
        start = PAGE + block * FRAMES
        assert frames(block) == segment[start : start + FRAMES]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_well_makes_the_golden_frames(sealed: bool) -> None:
    name = "sealed-2.frame" if sealed else "plain-2.frame"
    first = (golden.FOLDER / name).read_bytes()
    assert frames(0, sealed=sealed)[: len(first)] == first


def test_a_well_makes_the_large_golden_frame_and_numbers_the_next_shard_after_its_chunks() -> None:
    nbytes = 2 * CHUNK + 100
    made = frames(0, nbytes)
    first, second = made[: frame_bytes(nbytes)], made[frame_bytes(nbytes) :]
    said = f"{blake3(first).hexdigest()} {len(first)} bytes\n"
    assert said == (golden.FOLDER / "large-2.blake3").read_text()
    header = FrameHeader.parse(second[:PAGE])
    assert header is not None
    assert header.nonce == RANDOM + b"\0\0\0\0\0\0\0\3"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("block", range(golden.BLOCKS))
def test_a_well_opens_the_frames_of_the_golden_segment(block: int, version: int) -> None:
    lying = np.fromfile(golden.FOLDER / f"closed-{version}.seg", np.uint8)
    by = sealing()
    empty = entry(by, block)
    incoming, at = by.incoming(empty), PAGE + block * FRAMES
    assert incoming.id == golden.ORIGIN.name(golden.digest(block))
    for part, nbytes in enumerate(incoming.parts):
        assert incoming.open(part, lying[at : at + nbytes], golden.SEGMENT) is Reading.GOOD
        at += nbytes
    for shard, (slab, slot) in enumerate(empty.slots):
        assert (slab.payload(slot) == golden.payload(block, shard)).all()
