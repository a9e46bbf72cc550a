"""Frames that a later release wrote: counted and kept, byte for byte, by whatever else a tier does."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from deep import DeepRig, chain
from disks import BLOCK, MIB, PER_SEGMENT, SHARDS, SPACE, Life, segments

import golden
from lab.rig.members import Model
from stepwell.block.frame import FrameHeader, is_unknown
from stepwell.block.layout import PAGE
from stepwell.ops.fsck import examine
from stepwell.protocol import messages as m
from stepwell.tiers.base import Reading
from stepwell.tiers.disk.layout import VERSION, Trailer

OURS = range(2 * PER_SEGMENT)
AHEAD = {"version": (8, b"\3\0"), "algorithm": (10, b"\2"), "flag": (11, b"\x40"), "codec": (12, b"\7\0")}
"""What a later release says in a header: where, and how."""


def said(page: bytes, at: int, what: bytes) -> bytes:
    page = page[:at] + what + page[at + len(what) : -4]
    return page + zlib.crc32(page).to_bytes(4, "little")


def rewrite(path: Path, page: int, at: int, what: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        made = said(file.read(PAGE), at, what)
        file.seek(page * PAGE)
        file.write(made)


def page_of(block: int) -> int:
    """Of a block's first frame, in the first segment."""
    return 1 + block * (BLOCK // PAGE)


def later(folder: Path, block: int, ahead: str = "version") -> tuple[Path, bytes]:
    """Two closed segments; a later release wrote a block of the older one. The file, and what it holds."""
    life = Life(folder)
    life.put_all(OURS)
    life.end()
    path = segments(folder)[0]
    rewrite(path, page_of(block), *AHEAD[ahead])
    return path, path.read_bytes()


def without(before: bytes, kept: set[int]) -> bytes:
    """The segment with zeros in place of all blocks but these."""
    made = bytearray(before)
    for block in set(range(PER_SEGMENT)) - kept:
        made[page_of(block) * PAGE : page_of(block + 1) * PAGE] = bytes(BLOCK)
    return bytes(made)


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_block_of_a_later_release_is_kept_by_all_but_a_clear_of_everything(ahead: str, tmp_path: Path) -> None:
    path, before = later(tmp_path, 5, ahead)
    life = Life(tmp_path)
    assert life.get(5) is Reading.UNKNOWN
    assert life.get(6) is Reading.GOOD, "its neighbours are ours"
    assert life.tier.figures()["kept_segments"] == 1
    assert life.put(5) and life.get(5) is Reading.GOOD, "it may be written anew, elsewhere"
    life.put_all(range(200, 600))
    assert life.tier.capacity().used <= 64 * MIB
    assert path in segments(tmp_path) and path.read_bytes() == before
    assert not life.clear(0).whole
    assert life.here(OURS) == set(), "what could be read of it is found no more"
    life.end()
    kept = without(before, kept={5})
    assert path.read_bytes() == kept, "known frames of the namespace are zeros, and nothing else is"
    again = Life(tmp_path)
    assert again.good(OURS) == set() and path.read_bytes() == kept
    assert again.clear().whole and not segments(tmp_path)
    again.end()


def test_a_segment_that_a_later_release_wrote_is_not_evicted(tmp_path: Path) -> None:
    """None of its blocks was read before: its first frame tells."""
    path, before = later(tmp_path, 0)
    life = Life(tmp_path)
    life.put_all(range(200, 600))
    assert path in segments(tmp_path) and path.read_bytes() == before
    assert life.tier.figures()["kept_segments"] == 1
    assert life.good(range(PER_SEGMENT)) == set(range(1, PER_SEGMENT)), "its known blocks stay readable"
    stored = life.tier.figures()["blocks"]
    assert life.tier.counts.evicted_blocks == len(OURS) + 400 - stored - 1, "the unknown one was found missing"
    life.end()


def test_a_hot_block_of_a_later_release_keeps_its_segment_from_eviction(tmp_path: Path) -> None:
    path, before = later(tmp_path, 7)
    life = Life(tmp_path)
    life.tier.touch(life.id(7))
    life.put_all(range(200, 600))
    assert path in segments(tmp_path) and path.read_bytes() == before
    life.end()


@pytest.mark.parametrize("named", [(68, b"\x81"), (72, b"\1")], ids=["codec", "flag"])
def test_a_segment_says_which_codecs_and_flags_its_frames_have(named: tuple[int, bytes], tmp_path: Path) -> None:
    path, _ = later(tmp_path, 7, "codec")
    rewrite(path, path.stat().st_size // PAGE - 1, *named)
    before = path.read_bytes()
    life = Life(tmp_path)
    assert life.tier.figures()["kept_segments"] == 1
    assert life.get(8) is Reading.GOOD and life.get(7) is Reading.UNKNOWN
    life.put_all(range(200, 600))
    assert not life.clear(0).whole
    assert path.read_bytes() == without(before, kept={7})
    life.end()


def test_what_this_release_writes_it_understands() -> None:
    trailer = Trailer.parse(golden.segment(VERSION, closed=True)[-PAGE:])
    assert trailer is not None and (trailer.codecs, trailer.flags) == (1, 0)


def test_an_open_segment_with_frames_of_a_later_release_gets_no_footer(tmp_path: Path) -> None:
    path, _ = later(tmp_path, 9)
    with path.open("r+b") as file:
        file.seek(-PAGE, 2)
        file.write(bytes(PAGE))
    before = path.read_bytes()
    life = Life(tmp_path)
    assert life.tier.figures()["kept_segments"] == 1
    assert life.get(8) is Reading.GOOD and life.get(10) is Reading.GOOD and life.get(9) is Reading.ABSENT
    life.put_all(range(SPACE, SPACE + 3))
    assert life.clear(1).whole is False, "some of it may be of this namespace"
    assert path.read_bytes() == before
    assert life.clear(0).whole is False
    assert path.read_bytes() == without(before, kept={9}), "and it still gets no footer"
    life.end()
    assert Life(tmp_path).here(OURS) == set()


def test_a_clear_leaves_other_namespaces_and_shards_beside_blocks_of_a_later_release(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(20))
    life.put_all(range(SPACE, SPACE + 20))
    life.end()
    (path,) = segments(tmp_path)
    rewrite(path, page_of(0) + BLOCK // PAGE // SHARDS, *AHEAD["codec"])
    rewrite(path, page_of(25), *AHEAD["flag"])
    before = path.read_bytes()
    life = Life(tmp_path)
    assert life.get(0) is Reading.UNKNOWN
    assert not life.clear(0).whole
    second = page_of(0) * PAGE + BLOCK // SHARDS
    zeros = bytes(BLOCK // SHARDS) + before[second : page_of(1) * PAGE] + bytes(19 * BLOCK)
    assert path.read_bytes() == before[:PAGE] + zeros + before[page_of(20) * PAGE :]
    ours = range(SPACE, SPACE + 20)
    assert life.good(ours) == set(ours) - {SPACE + 5}
    life.end()


def test_frames_are_not_zeroed_on_the_word_of_a_footer(tmp_path: Path) -> None:
    """It names pages of another block: what lies there says whose it is."""
    path, _ = later(tmp_path, 5)
    life = Life(tmp_path)
    assert life.get(5) is Reading.UNKNOWN
    rewrite(path, page_of(6), 80, b"x")
    rewrite(path, page_of(7), 16, b"x")
    rewrite(path, page_of(9), 128, (1 << 20).to_bytes(8, "little") * 2)
    before = path.read_bytes()
    assert not life.clear(0).whole
    assert path.read_bytes() == without(before, kept={5, 6, 7, 9})
    life.end()


def test_a_later_frame_of_an_earlier_life_is_none_of_this_one() -> None:
    """Of our own version, so that it says whose it is."""
    page = said(golden.header(0, 0, sealed=True).pack(), *AHEAD["codec"])
    assert is_unknown(page, golden.SEGMENT) and not is_unknown(page, b"another segment!")
    assert not is_unknown(golden.header(0, 0, sealed=True).pack(), golden.SEGMENT)
    assert not is_unknown(page[:-1] + b"x", golden.SEGMENT) and not is_unknown(page[:100], golden.SEGMENT)


def test_fsck_tells_unknown_from_damaged(tmp_path: Path) -> None:
    later(tmp_path, 3)
    report = examine(tmp_path, tmp_path / "none")
    assert report.blocks["unknown"] == 1 and report.blocks["damaged"] == 0 and report.ok


# where a block is in its prefix --------------------------------------------------------------------------------------


def test_frames_say_how_many_blocks_come_before() -> None:
    rig = DeepRig()
    engine = rig.join(Model())
    digests = chain(4)
    engine.scheduler.say(m.Reserve(1, 0, b"", digests[:64], 0))
    engine.scheduler.say(m.Reserve(2, 0, b"p" * 32, digests[64:], 7))
    rig.settle()
    for granted in engine.scheduler.take(m.Granted):
        engine.workers[0].say(m.Filled(granted.leases, []))
    rig.settle()
    headers = [FrameHeader.parse(kept.frames[:PAGE]) for kept in rig.below.blocks.values()]
    assert sorted(header.position for header in headers if header is not None) == [0, 1, 7, 8]
    again = rig.next_life()
    other = again.join(Model())
    assert other.found(digests) == 4
    entries = list(again.hierarchy.index.values())
    assert sorted(entry.position for entry in entries) == [0, 1, 7, 8], "what is promoted knows it from its frames"


# what an earlier release began ---------------------------------------------------------------------------------------


def test_the_footer_that_a_segment_of_version_1_lacked_is_as_its_own_release_writes_it(tmp_path: Path) -> None:
    """That release reads nothing of a segment whose trailer has a later version."""
    path = tmp_path / golden.SEGMENT_NAME
    path.write_bytes(golden.segment(1, closed=False))
    Life(tmp_path).end()
    assert path.read_bytes() == (golden.FOLDER / "closed-1.seg").read_bytes()


def test_a_footer_without_a_cleared_namespace_has_the_version_of_its_segment(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(20))
    life.put_all(range(SPACE, SPACE + 20))
    life.end()
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    head = golden.of_version_1(whole[:PAGE], 160, 160)
    path.write_bytes(head + whole[PAGE:-PAGE] + golden.of_version_1(whole[-PAGE:], 68, 76))
    life = Life(tmp_path)
    assert life.clear(1).whole
    life.end()
    after = path.read_bytes()
    trailer = after[-PAGE:]
    assert after[:PAGE] == head and Trailer.parse(trailer) is not None
    assert (trailer[8:10], trailer[68:76]) == (b"\1\0", bytes(8))
    assert Life(tmp_path).good(range(20)) == set(range(20))
