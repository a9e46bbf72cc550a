"""What a tier may ask about keys: which frames will open, and to make them anew for another segment."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from deep import DeepRig, chain, fill

from lab.rig.members import Model
from stepwell.block.frame import MAX_PAYLOAD, FrameHeader
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import NO_COMMITMENT
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.testing.arena_kit import SLOT
from stepwell.testing.dict_tier import Kept
from stepwell.tiers.base import Place, Reading
from stepwell.vault.keyring import Keyring

HERE, THERE = b"h" * 16, b"t" * 16
TWO = Model(world=2)


def commitment(frames: bytes) -> bytes:
    """As it lies in a frame's header."""
    return frames[32:64]


class Written:
    """A block of two shards as it lies in a tier, and the `Sealing` that made it."""

    def __init__(self, *, sealed: bool) -> None:
        self.rig = DeepRig(sealed=sealed)
        self.engine = self.rig.join(TWO)
        fill(self.engine, chain(1), word=7)
        self.rig.settle()
        (self.id,) = self.rig.below.blocks
        self.kept = self.rig.below.blocks[self.id]
        self.sealing = Sealing(self.rig.keyring, sealed=sealed, wall=lambda: 1.0)

    def remade(self, frames: bytes, by: Sealing, segment: bytes | None = None) -> bytes | None:
        into = np.empty(len(frames), np.uint8)
        made = by.remake(np.frombuffer(frames, np.uint8), segment or self.kept.segment, into, Place(THERE, 5))
        return into.tobytes() if made is Reading.GOOD else None


def test_keys_are_known_by_their_commitment_and_segment() -> None:
    written = Written(sealed=True)
    mine, segment = commitment(written.kept.frames), written.kept.segment
    assert len(mine) == 32 and mine != NO_COMMITMENT
    assert written.sealing.knows(mine, segment)
    assert not written.sealing.knows(mine, HERE)
    assert not Sealing(Keyring.ephemeral(), sealed=True, wall=lambda: 1.0).knows(mine, segment)
    there = written.sealing.again(mine, segment, THERE)
    assert there is not None and there != mine
    assert written.sealing.knows(there, THERE)
    assert written.sealing.again(mine, HERE, THERE) is None


@pytest.mark.parametrize("sealed", [True, False])
def test_plain_frames_are_known_where_nothing_is_sealed(sealed: bool) -> None:
    sealing = Sealing(Keyring.ephemeral(), sealed=sealed, wall=lambda: 1.0)
    assert sealing.knows(NO_COMMITMENT, HERE) is not sealed
    assert sealing.again(NO_COMMITMENT, HERE, THERE) == (None if sealed else NO_COMMITMENT)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_block_made_anew_opens_in_its_new_segment_alone(sealed: bool) -> None:
    written = Written(sealed=sealed)
    frames = written.remade(written.kept.frames, written.sealing)
    assert frames is not None
    assert frames != written.kept.frames
    for segment, blocks in ((THERE, 1), (written.kept.segment, 0)):
        written.rig.below.blocks[written.id] = Kept(frames, segment)
        again = written.rig.next_life(sealed=sealed)
        assert again.join(TWO).found(chain(1)) == blocks


@pytest.mark.parametrize("sealed", [True, False])
def test_what_does_not_open_is_not_made_anew(sealed: bool) -> None:
    written = Written(sealed=sealed)
    frames = written.kept.frames
    half = len(frames) // 2
    assert written.remade(frames, written.sealing, HERE) is None, "of another segment"
    assert written.remade(frames[: half - PAGE], written.sealing) is None, "cut"
    assert written.remade(frames[: half + PAGE], written.sealing) is None, "cut in its second shard"
    for byte in (100, PAGE + 5, half + 100, half + PAGE + SLOT - 1, half + PAGE + SLOT + 3):
        broken = bytearray(frames)
        broken[byte] ^= 1
        assert written.remade(bytes(broken), written.sealing) is None, byte


def test_what_a_frame_claims_beyond_its_blocks_bytes_is_not_allocated() -> None:
    written = Written(sealed=True)
    frames = written.kept.frames
    header = FrameHeader.parse(frames[:PAGE])
    assert header is not None
    forged = replace(header, payload=MAX_PAYLOAD, raw=MAX_PAYLOAD).pack() + frames[PAGE:]
    tracemalloc.start()
    try:
        assert written.remade(forged, written.sealing) is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_sealed_well_makes_no_plain_frame_anew() -> None:
    written = Written(sealed=False)
    assert written.remade(written.kept.frames, written.sealing) is not None
    assert written.remade(written.kept.frames, Sealing(written.rig.keyring, sealed=True, wall=lambda: 1.0)) is None


def test_without_its_key_nothing_is_made_anew() -> None:
    written = Written(sealed=True)
    for sealed in (True, False):
        stranger = Sealing(Keyring.ephemeral(), sealed=sealed, wall=lambda: 1.0)
        assert written.remade(written.kept.frames, stranger) is None


def test_a_namespace_has_a_tag_of_its_own_in_each_key_epoch() -> None:
    rigs = [DeepRig(), DeepRig()]
    tags = set()
    for rig in rigs:
        for n, model in enumerate((Model(), Model(weights=b"x" * 32), Model(block_tokens=256))):
            member = rig.join(model, name=str(n)).scheduler.member
            assert member is not None
            tags |= {member.session.origins(epoch)[0].tag for epoch in (0, 1)}
    assert len(tags) == 12
    assert all(len(tag) == 16 for tag in tags)
