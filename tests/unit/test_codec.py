"""A codec's way through a tier, with one that is as plain as can be: what frames and segments say of it, whose blocks
it encodes, and what becomes of them in a release that does not know it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deep import chain, fill
from disks import PER_SEGMENT, SHARD, Life, segments

from lab.rig.members import FakeEngine, Model, Rig
from stepwell.block import frame
from stepwell.block.frame import FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.io.memory import Bytes
from stepwell.testing.arena_kit import SLAB, SLOT
from stepwell.testing.dict_tier import DictTier
from stepwell.tiers.disk import layout
from stepwell.tiers.disk.layout import Trailer


class Twice:
    """Each byte two times, so that frames are larger than slots and nothing is lost."""

    number = 5
    parameters = b"two of each byte"

    def serves(self, dtype: str) -> bool:
        return dtype == "bfloat16"

    def payload_bytes(self, raw: int) -> int:
        return 2 * raw

    def encode(self, raw: Bytes) -> Bytes:
        return np.repeat(raw, 2)

    def decode(self, payload: Bytes, into: Bytes) -> None:
        into[:] = payload[::2]


def know(monkeypatch: pytest.MonkeyPatch, *codecs: int) -> None:
    """A release with these codecs."""
    monkeypatch.setattr(frame, "CODECS", codecs)
    monkeypatch.setattr(layout, "KNOWN_CODECS", sum(1 << codec for codec in codecs))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, 0, Twice.number)


def first_header(path: Path) -> FrameHeader:
    header = FrameHeader.parse(path.read_bytes()[PAGE : 2 * PAGE])
    assert header is not None
    return header


def codecs_of(path: Path) -> int:
    trailer = Trailer.parse(path.read_bytes()[-PAGE:])
    assert trailer is not None
    return trailer.codecs


def test_blocks_are_encoded_on_disk_and_come_back_in_this_life_and_the_next(tmp_path: Path) -> None:
    life = Life(tmp_path, codec=Twice())
    life.put_all(range(8))
    assert life.good(range(8)) == set(range(8))
    life.end()
    (path,) = segments(tmp_path)
    header = first_header(path)
    assert (header.codec, header.parameters) == (Twice.number, Twice.parameters)
    assert (header.payload, header.raw) == (2 * SHARD, SHARD)
    assert codecs_of(path) == 1 << 0 | 1 << Twice.number
    again = Life(tmp_path, codec=Twice())
    assert again.good(range(8)) == set(range(8))
    again.end()


def test_blocks_of_a_codec_are_no_others(tmp_path: Path) -> None:
    """A well that encodes finds nothing of one that does not, and the other way round: their blocks have other ids."""
    life = Life(tmp_path)
    life.put_all(range(3))
    life.end()
    (path,) = segments(tmp_path)
    assert codecs_of(path) == 1, "only codecs that are used are named"
    encoding = Life(tmp_path, codec=Twice())
    assert encoding.here(range(3)) == set() and encoding.tag(0) != life.tag(0)
    encoding.put_all(range(3))
    encoding.end()
    assert Life(tmp_path).good(range(3)) == set(range(3))


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_a_reader_without_the_codec_keeps_its_frames_as_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    life = Life(tmp_path, codec=Twice())
    life.put_all(range(4))
    life.kill() if ends == "killed" else life.end()
    if ends == "killed":
        Life(tmp_path, codec=Twice()).end()  # which gives it a footer, made of the frames
    (path,) = segments(tmp_path)
    before = path.read_bytes()
    segment = first_header(path).segment
    know(monkeypatch, 0)
    assert frame.is_unknown(before[PAGE : 2 * PAGE], segment)
    without = Life(tmp_path)
    assert without.tier.figures()["kept_segments"] == 1
    without.put_all(range(200, 600))
    without.end()
    assert path.read_bytes() == before
    know(monkeypatch, 0, Twice.number)
    assert Life(tmp_path, codec=Twice()).good(range(4)) == set(range(4))


def test_hot_blocks_are_written_again_as_they_were_encoded(tmp_path: Path) -> None:
    """Here by a well that does not encode itself: the segment that they come into names their codec."""
    encoding = Life(tmp_path, codec=Twice())
    encoding.put_all(range(4))
    encoding.end()
    life = Life(tmp_path)
    life.tier.touch(encoding.id(2))
    life.put_all(range(4 * PER_SEGMENT))
    assert life.tier.counts.reinserted_blocks == 1
    life.end()
    assert [codecs_of(path) >> Twice.number for path in segments(tmp_path)].count(1) == 1
    assert Life(tmp_path, codec=Twice()).good(range(4)) == {2}


@pytest.mark.parametrize(("dtype", "encoded"), [("bfloat16", True), ("float16", False), ("", False)])
def test_only_engines_whose_kv_it_serves_are_encoded(dtype: str, encoded: bool) -> None:
    below: list[DictTier] = []

    def tiers(executor):  # type: ignore[no-untyped-def]
        below.append(DictTier(1 << 30, executor))
        return below

    rig = Rig(2 * SLAB, seed=1, tiers=tiers, codec=Twice())
    rig.hierarchy.recover()
    engine = FakeEngine(rig, Model(dtype=dtype))
    rig.settle()
    fill(engine, chain(1), word=7)
    rig.settle()
    (kept,) = below[0].blocks.values()
    header = FrameHeader.parse(kept.frames[:PAGE])
    assert header is not None and header.codec == (Twice.number if encoded else 0)
    assert len(kept.frames) == frame_bytes(2 * SLOT if encoded else SLOT)
