"""What disks, people and kills do to a tier: it misses, it says so, and it never gives out other bytes."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from disks import BLOCK, MIB, PER_SEGMENT, SEGMENT, SHARDS, FaultyFiles, Life, poke, segments
from wells import open_files

from stepwell.block.frame import FrameHeader
from stepwell.block.layout import PAGE
from stepwell.io.files import SystemFiles
from stepwell.tiers.base import Forgotten, Reading, Writing
from stepwell.tiers.disk.layout import Head
from stepwell.tiers.disk.segment import Handles
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

SOME = range(100)
OTHER_KEYS = Keyring((TenantKeys("default", (Epoch(1, b"another key of thirty-two bytes!"),)),))


def a_life(folder: Path, numbers: range = SOME) -> None:
    """Leaves these blocks in closed segments."""
    life = Life(folder)
    life.put_all(numbers)
    life.end()


def flip(path: Path, offset: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    poke(path, offset, bytes([byte ^ 0x10]))


# files that are not what they were ------------------------------------------------------------------------------------


def test_all_is_found_after_a_good_end(tmp_path: Path) -> None:
    a_life(tmp_path)
    life = Life(tmp_path)
    assert life.recovered == [100]
    assert life.good(SOME) == set(SOME)
    assert life.troubles == []
    life.end()


@pytest.mark.parametrize("left", [0, 100, PAGE, PAGE + 5, 10 * BLOCK + PAGE, 10 * BLOCK + 777, SEGMENT - PAGE])
def test_a_truncated_segment_yields_what_it_has(tmp_path: Path, left: int) -> None:
    a_life(tmp_path)
    victim, other = segments(tmp_path)
    os.truncate(victim, left)
    life = Life(tmp_path)
    good = life.good(SOME)
    whole = max(0, (left - PAGE) // BLOCK)
    assert set(range(min(whole, PER_SEGMENT))) <= good, "each block that is whole is found without a footer"
    assert set(range(PER_SEGMENT, 100)) <= good, "other segments have theirs"
    assert life.good(SOME) == good
    assert life.tier.capacity().used == left + other.stat().st_size if left else True
    life.put_all(range(200, 500))
    assert life.tier.capacity().used <= life.tier.capacity().limit
    life.end()


def test_a_flipped_bit_costs_its_block_and_no_other(tmp_path: Path) -> None:
    a_life(tmp_path)
    flip(segments(tmp_path)[0], PAGE + 5 * BLOCK + BLOCK // 2)
    life = Life(tmp_path)
    assert life.get(5) is Reading.DAMAGED
    assert not life.tier.lookup(life.id(5)), "it is looked up no more"
    assert life.get(5) is Reading.ABSENT
    assert life.good(SOME) == set(SOME) - {5}
    assert life.put(5) == [Writing.STORED]
    assert life.get(5) is Reading.GOOD
    life.end()


def test_segments_that_changed_names_are_what_they_are(tmp_path: Path) -> None:
    a_life(tmp_path)
    first, second = segments(tmp_path)
    first.rename(tmp_path / "third")
    second.rename(first)
    (tmp_path / "third").rename(second)
    life = Life(tmp_path)
    assert life.good(SOME) == set(SOME)
    life.end()


def test_segments_that_changed_places_under_a_running_tier_are_refused(tmp_path: Path) -> None:
    """Reads go through open files or through names: both are tried."""
    life = Life(tmp_path)
    life.put_all(SOME)
    first, second = segments(tmp_path)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert life.good(SOME) == set()
    life.put_all(range(200, 300))
    assert life.good(range(200, 300)) == set(range(200, 300))
    life.end()


def test_frames_that_changed_places_are_refused(tmp_path: Path) -> None:
    a_life(tmp_path)
    path = segments(tmp_path)[0]
    with path.open("rb") as file:
        file.seek(PAGE)
        first, second = file.read(BLOCK), file.read(BLOCK)
    poke(path, PAGE, second + first)
    life = Life(tmp_path)
    assert life.good(SOME) == set(SOME) - {0, 1}
    life.end()


def test_a_missing_segment_is_a_miss(tmp_path: Path) -> None:
    a_life(tmp_path)
    segments(tmp_path)[0].unlink()
    life = Life(tmp_path)
    assert life.good(SOME) == set(range(PER_SEGMENT, 100))
    assert life.tier.capacity().used == SEGMENT
    life.end()


def test_files_deleted_under_a_running_tier_are_misses_and_their_space_comes_back(tmp_path: Path) -> None:
    a_life(tmp_path)
    life = Life(tmp_path)
    life.put_all(range(200, 210))
    for path in segments(tmp_path):
        path.unlink()
    life.good(SOME)
    life.put_all(range(300, 700))
    assert life.good(range(600, 700)) == set(range(600, 700))
    lying = sum(path.stat().st_size for path in segments(tmp_path))
    life.put_all(range(700, 1100))
    assert life.good(range(1050, 1100)) == set(range(1050, 1100))
    assert sum(path.stat().st_size for path in segments(tmp_path)) == 4 * SEGMENT, "it fills its limit again"
    assert lying <= 64 * MIB
    life.end()
    again = Life(tmp_path)
    assert again.good(range(1050, 1100)) == set(range(1050, 1100)), "what was written last outlives the tier"
    again.end()


@pytest.mark.parametrize("how", ["missing", "flipped", "records flipped", "of another segment"])
def test_a_footer_that_does_not_hold_is_made_anew_from_the_frames(tmp_path: Path, how: str) -> None:
    a_life(tmp_path)
    first, second = segments(tmp_path)
    if how == "missing":
        poke(first, SEGMENT - 2 * PAGE, bytes(2 * PAGE))
    elif how == "flipped":
        flip(first, SEGMENT - 10)
    elif how == "records flipped":
        flip(first, SEGMENT - 2 * PAGE + 100)
    else:
        poke(first, SEGMENT - 2 * PAGE, second.read_bytes()[-2 * PAGE :])
    life = Life(tmp_path)
    assert life.good(SOME) == set(SOME)
    life.end()
    again = Life(tmp_path)
    scanned = [seen for seen in again.files[0].seen if seen[0] == "read"]
    assert len(scanned) <= 6, "the next life reads footers only"
    assert again.good(SOME) == set(SOME)
    again.end()


def test_another_version_is_counted_and_left_alone(tmp_path: Path) -> None:
    a_life(tmp_path)
    victim = segments(tmp_path)[0]
    page = bytearray(victim.read_bytes()[:PAGE])
    page[8:10] = (3).to_bytes(2, "little")
    poke(victim, 0, bytes(page[:-4]) + zlib.crc32(page[:-4]).to_bytes(4, "little"))
    before = victim.read_bytes()
    life = Life(tmp_path)
    assert life.tier.figures()["kept_segments"] == 1
    assert life.tier.figures()["foreign_files"] == 0
    assert life.tier.capacity().used == 2 * SEGMENT, "it takes room"
    assert life.good(SOME) == set(range(PER_SEGMENT, 100))
    life.put_all(range(200, 500))
    assert victim.read_bytes() == before
    assert life.tier.capacity().used <= 64 * MIB
    life.clear()
    assert not segments(tmp_path), "it was ours, and goes with all that is"
    life.end()


def test_a_segment_with_a_damaged_head_is_kept_and_goes_when_all_is_cleared(tmp_path: Path) -> None:
    """Its trailer says that it is ours; without one it may be anybody's."""
    a_life(tmp_path)
    ours, anybodys = segments(tmp_path)[:2]
    poke(ours, 20, b"xx")
    poke(anybodys, 20, b"xx")
    poke(anybodys, anybodys.stat().st_size - PAGE, bytes(PAGE))
    life = Life(tmp_path)
    figures = life.tier.figures()
    assert (figures["kept_segments"], figures["foreign_files"]) == (1, 1)
    life.clear()
    assert segments(tmp_path) == [anybodys]
    life.end()


def test_other_peoples_files_are_left_byte_for_byte(tmp_path: Path) -> None:
    folder, outside = tmp_path / "disk", tmp_path / "outside"
    folder.mkdir()
    outside.write_bytes(b"precious" * 1000)
    strange = {
        "notes.txt": b"do not delete",
        "0123456789abcdef.seg.bak": bytes(PAGE),
        "aaaaaaaaaaaaaaaa.seg": b"not a segment at all" * 1000,
        "bbbbbbbbbbbbbbbb.seg": b"\1" + bytes(PAGE - 1),
        "CCCCCCCCCCCCCCCC.seg": bytes(PAGE),
    }
    for name, data in strange.items():
        (folder / name).write_bytes(data)
    (folder / "dddddddddddddddd.seg").mkdir()
    (folder / "eeeeeeeeeeeeeeee.seg").symlink_to(outside)
    os.mkfifo(folder / "ffffffffffffffff.seg")
    life = Life(folder)
    assert life.tier.figures()["foreign_files"] == 8
    life.put_all(range(300))
    life.clear()
    life.put_all(range(300, 400))
    life.end()
    assert {name: (folder / name).read_bytes() for name in strange} == strange
    assert outside.read_bytes() == b"precious" * 1000
    assert (folder / "dddddddddddddddd.seg").is_dir()
    assert (folder / "eeeeeeeeeeeeeeee.seg").is_symlink()
    assert (folder / "ffffffffffffffff.seg").is_fifo()


def test_a_segment_larger_than_pages_can_be_named_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "0123456789abcdef.seg"
    nbytes = 65537 * PAGE
    path.write_bytes(Head(b"i" * 16, 1, nbytes, 1).pack())
    os.truncate(path, nbytes)
    life = Life(tmp_path, limit=512 * MIB)
    assert life.tier.figures()["foreign_files"] == 1
    life.end()
    assert path.stat().st_size == nbytes


def test_the_last_page_of_the_largest_segment_can_be_named(tmp_path: Path) -> None:
    """256 MiB are 65,536 pages; the last block's first page comes before the footer."""
    life = Life(tmp_path, limit=64 * 256 * MIB)
    assert life.tier._directories[0].segment_bytes == 256 * MIB
    life.put_all(range(1100))
    assert len(segments(tmp_path)) == 2
    assert life.good(range(980, 1000)) == set(range(980, 1000))
    life.end()
    again = Life(tmp_path, limit=64 * 256 * MIB)
    assert again.recovered == [1100]
    again.end()


# recovery -------------------------------------------------------------------------------------------------------------


def test_an_open_segment_is_recovered_from_its_frames(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(20))
    life.kill()
    again = Life(tmp_path)
    assert again.good(range(20)) == set(range(20))
    again.end()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_gap_in_an_open_segment_costs_what_is_in_it(tmp_path: Path, lost: int) -> None:
    """Writes are under way side by side: a later one may have been done and an earlier one not."""
    life = Life(tmp_path)
    writes = 0

    def lose(operation: str, name: str, offset: int) -> str | None:
        nonlocal writes
        writes += operation == "write" and offset > 0
        return "lose" if operation == "write" and offset > 0 and writes == lost + 1 else None

    life.files[0].fault = lose
    life.put_all(range(24))
    life.kill()
    again = Life(tmp_path)
    gone = set(range(8 * lost, 8 * lost + 8))
    assert again.good(range(24)) == set(range(24)) - gone
    again.end()


def test_a_frame_that_claims_what_no_footer_can_list_costs_its_block_and_no_other(tmp_path: Path) -> None:
    """Whoever can write there can make a header's checksum, and be believed so far."""
    life = Life(tmp_path)
    life.put_all(range(8))
    life.kill()
    (path,) = segments(tmp_path)
    for shard in range(SHARDS):
        at = PAGE + 3 * BLOCK + shard * BLOCK // SHARDS
        header = FrameHeader.parse(path.read_bytes()[at : at + PAGE])
        assert header is not None
        poke(path, at, replace(header, expires=2**63).pack())
    again = Life(tmp_path)
    assert again.good(range(8)) == {0, 1, 2, 4, 5, 6, 7}
    assert again.troubles == []
    again.end()


def test_a_block_whose_last_shard_is_missing_is_no_block(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(8))
    life.kill()
    poke(segments(tmp_path)[0], PAGE + 3 * BLOCK + BLOCK // 2, bytes(PAGE))
    again = Life(tmp_path)
    assert again.good(range(8)) == {0, 1, 2, 4, 5, 6, 7}
    again.end()


def test_a_file_that_was_made_and_never_written_is_used(tmp_path: Path) -> None:
    for name in "01":
        with (tmp_path / f"{name * 16}.seg").open("wb") as file:
            file.truncate(SEGMENT)
    life = Life(tmp_path)
    assert life.tier.capacity().used == 2 * SEGMENT
    life.put_all(range(PER_SEGMENT + 10))
    assert {path.name[0] for path in segments(tmp_path)} == {"0", "1"}
    life.end()


def test_files_that_only_look_like_ones_that_we_have_not_written_yet_are_left_alone(tmp_path: Path) -> None:
    """Others number their logs with 16 digits too, and begin them with zeros."""
    late = bytes(PAGE) + b"precious" * 512
    left = {"2": b"", "3": bytes(5 * PAGE), "4": late, "5": late + bytes(SEGMENT - len(late))}
    for name, content in left.items():
        (tmp_path / f"{name * 16}.seg").write_bytes(content)
    life = Life(tmp_path)
    assert life.tier.figures()["foreign_files"] == len(left)
    life.put_all(range(PER_SEGMENT + 10))
    life.clear()
    life.end()
    assert {path.name[0]: path.read_bytes() for path in segments(tmp_path)} == left


def test_many_files_are_looked_at(tmp_path: Path) -> None:
    life = Life(tmp_path, limit=512 * MIB)
    life.put_all(range(20 * PER_SEGMENT))
    life.end()
    for seed in range(3):
        again = Life(tmp_path, limit=512 * MIB, seed=seed)
        assert again.recovered == [20 * PER_SEGMENT]
        again.end()


@pytest.mark.parametrize("seed", range(4))
def test_a_shrunk_capacity_is_kept_to_at_once(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, limit=256 * MIB)
    life.put_all(range(10 * PER_SEGMENT))
    life.end()
    again = Life(tmp_path, seed=seed)
    assert again.tier.capacity().used <= 64 * MIB
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 64 * MIB
    kept = again.good(range(10 * PER_SEGMENT))
    assert kept >= set(range(7 * PER_SEGMENT, 10 * PER_SEGMENT)), "the oldest go"
    again.put_all(range(5000, 5100))
    again.end()


def test_writes_wait_until_it_is_known_what_lies_there(tmp_path: Path) -> None:
    a_life(tmp_path, range(4 * PER_SEGMENT))
    life = Life(tmp_path, recovers=False)
    answers, cleared = life.write(9000), list[Forgotten]()
    life.tier.recover(life.recovered.append)
    while life.executor.step():
        assert life.tier.capacity().used <= 64 * MIB
        assert answers == [] or life.recovered
    assert answers == [[Writing.STORED]]
    life.end()
    life = Life(tmp_path, recovers=False)
    life.tier.clear(cleared.append)
    life.tier.recover(life.recovered.append)
    life.executor.drain()
    assert [forgotten.blocks for forgotten in cleared] == [3 * PER_SEGMENT + 1]
    assert not segments(tmp_path), "so does clearing"
    life.end()


def test_an_unreadable_directory_is_full_and_nothing_else(tmp_path: Path) -> None:
    life = Life(tmp_path, fault=lambda files: files.fail(errno.EIO, "names"))
    assert life.recovered == [0]
    assert life.put(1) == [Writing.FULL]
    assert life.get(1) is Reading.ABSENT
    assert life.clear() == life.clear(0) == Forgotten(whole=False)
    life.end()
    assert not segments(tmp_path)


def test_a_file_that_cannot_be_looked_at_counts(tmp_path: Path) -> None:
    a_life(tmp_path)
    bad = segments(tmp_path)[0].name

    def fault(files: FaultyFiles) -> None:
        def fails(operation: str, name: str, offset: int) -> None:
            if operation == "open" and name == bad:
                raise OSError(errno.EIO, "I/O error")

        files.fault = fails

    life = Life(tmp_path, fault=fault)
    assert life.good(SOME) == set(range(PER_SEGMENT, 100))
    assert life.tier.capacity().used == 2 * SEGMENT
    life.put_all(range(200, 500))
    assert (tmp_path / bad).exists()
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 64 * MIB
    life.end()


# keys -----------------------------------------------------------------------------------------------------------------


def test_segments_of_lost_keys_are_kept_and_counted(tmp_path: Path) -> None:
    a_life(tmp_path, range(3 * PER_SEGMENT))
    before = {path: path.read_bytes() for path in segments(tmp_path)}
    assert len(before) == 3
    life = Life(tmp_path, keyring=OTHER_KEYS)
    assert life.recovered == [0]
    assert life.tier.figures()["kept_segments"] == 3
    life.put_all(range(1000, 1400))
    life.end()
    assert all(path.read_bytes() == data for path, data in before.items())
    again = Life(tmp_path)
    assert again.good(range(3 * PER_SEGMENT)) == set(range(3 * PER_SEGMENT)), "and are there when the keys are back"
    assert again.tier.figures()["kept_segments"] == 1
    again.end()


def test_a_tier_full_of_lost_keys_takes_nothing(tmp_path: Path) -> None:
    a_life(tmp_path, range(4 * PER_SEGMENT))
    life = Life(tmp_path, keyring=OTHER_KEYS)
    assert life.put(1000) == [Writing.FULL]
    assert life.clear() == Forgotten(0, 4 * SEGMENT)
    assert life.tier.figures()["kept_segments"] == 0
    assert not segments(tmp_path), "who clears it asks for that"
    assert life.put(1000) == [Writing.STORED]
    life.end()


def test_plain_segments_are_kept_where_blocks_are_sealed(tmp_path: Path) -> None:
    life = Life(tmp_path, sealed=False)
    life.put_all(range(10))
    assert life.good(range(10)) == set(range(10))
    life.end()
    again = Life(tmp_path)
    assert again.good(range(10)) == set()
    assert again.tier.figures()["kept_segments"] == 1
    again.end()


# room -----------------------------------------------------------------------------------------------------------------


def test_the_reserve_is_never_taken(tmp_path: Path) -> None:
    life = Life(tmp_path, reserve=100 * MIB)
    own = 0

    def available() -> int:
        return 140 * MIB - sum(path.stat().st_size for path in segments(tmp_path))

    life.files[0].available = available
    for first in range(0, 400, 8):
        life.put(*range(first, first + 8))
        own = max(own, sum(path.stat().st_size for path in segments(tmp_path)))
        assert available() >= 100 * MIB
    assert own == 2 * SEGMENT
    assert life.good(range(390, 400)) == set(range(390, 400)), "it goes on with what it has"
    assert any(kind == "no_space" for kind, _ in life.troubles)
    life.end()


def test_what_others_need_is_given_back_and_taken_again_later(tmp_path: Path) -> None:
    life = Life(tmp_path, reserve=100 * MIB)
    others = 0
    life.files[0].available = lambda: 200 * MIB - others - sum(path.stat().st_size for path in segments(tmp_path))
    life.put_all(range(5 * PER_SEGMENT))
    assert len(segments(tmp_path)) == 4
    others = 64 * MIB
    for first in range(1000, 1240, 8):
        life.put(*range(first, first + 8))
    assert len(segments(tmp_path)) == 2, "as much as they need and no more"
    others = 0
    life.clock.advance(10)
    life.put_all(range(2000, 2300))
    assert len(segments(tmp_path)) == 4
    life.end()


def test_no_room_at_all_is_an_answer(tmp_path: Path) -> None:
    life = Life(tmp_path, reserve=100 * MIB)
    life.files[0].available = lambda: 100 * MIB
    assert life.put(*SOME[:8]) == [Writing.FULL] * 8
    assert not segments(tmp_path)
    assert life.tier.capacity().used == 0
    life.end()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_while_it_is_written_to(tmp_path: Path, code: int) -> None:
    life = Life(tmp_path)
    life.put_all(range(16))
    life.files[0].fail(code, "create", "write")
    assert life.put(100) == [Writing.FAILED]
    assert life.put(101) == [Writing.FULL]
    assert life.good(range(16)) == set(range(16))
    assert {kind for kind, _ in life.troubles} == {"no_space"}
    life.files[0].heal()
    life.clock.advance(10)
    assert life.put(102) == [Writing.STORED]
    assert life.good(range(16)) == set(range(16))
    life.end()


# devices that say no --------------------------------------------------------------------------------------------------


def test_a_read_that_fails_is_a_miss_and_the_block_stays(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(10))
    life.files[0].fail(errno.EIO, "read")
    assert life.get(3) is Reading.FAILED
    assert life.tier.counts.errors == {"read": 1}
    life.files[0].heal()
    assert life.good(range(10)) == set(range(10))
    life.end()


def test_a_write_that_fails_ends_its_segment_and_what_was_there_stays(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(16))
    life.files[0].fail(errno.EIO, "write")
    assert life.put(100, 101) == [Writing.FAILED] * 2
    assert not life.tier.lookup(life.id(100))
    life.files[0].heal()
    assert life.put(102) == [Writing.FULL], "it is left alone for a moment"
    life.clock.advance(5)
    assert life.put(102) == [Writing.STORED]
    assert len(segments(tmp_path)) == 2, "nothing more is placed in the segment that failed"
    assert life.good(range(16)) == set(range(16))
    life.kill()
    again = Life(tmp_path)
    assert again.good(range(103)) == {*range(16), 102}
    again.end()


def test_where_there_is_no_o_direct_blocks_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemFiles, "_takes_direct", lambda files: False)
    a_life(tmp_path, range(2 * PER_SEGMENT))
    life = Life(tmp_path)
    assert not life.files[0].direct
    assert life.good(range(2 * PER_SEGMENT)) == set(range(2 * PER_SEGMENT))
    life.end()


def test_a_device_that_takes_no_writes_keeps_what_can_be_read(tmp_path: Path) -> None:
    """A full tier evicts to write. Where each write fails, that would cost a segment every time."""
    a_life(tmp_path, range(4 * PER_SEGMENT))
    life = Life(tmp_path)
    life.files[0].fail(errno.EROFS, "write", "create", "unlink")
    for n in range(1000, 1600):
        assert life.put(n) in ([Writing.FULL], [Writing.FAILED])
        life.clock.advance(0.1)  # a minute in all
    lost = 4 * PER_SEGMENT - len(life.good(range(4 * PER_SEGMENT)))
    assert life.tier.capacity().used == 4 * SEGMENT, "what could not be deleted counts"
    tries = sum(operation == "write" for operation, _, _ in life.files[0].seen)
    assert tries <= 8
    assert lost <= PER_SEGMENT, "one segment was emptied for the first of them"
    life.files[0].heal()
    life.tier.close()


def test_a_create_that_fails_is_tried_again_later(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.files[0].fail(errno.EIO, "create")
    assert life.put(1) == [Writing.FULL]
    life.files[0].heal()
    assert life.put(1) == [Writing.FULL]
    assert life.tier.capacity().used == 0
    life.clock.advance(10)
    assert life.put(1) == [Writing.STORED]
    life.end()


def test_files_that_could_be_neither_made_nor_deleted_do_not_fill_it_for_ever(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.files[0].fail(errno.EROFS, "create", "unlink", "write")
    for n in range(life.tier.capacity().limit // SEGMENT):
        assert life.put(n) == [Writing.FULL]
        life.clock.advance(400)
    assert life.tier.capacity().used == life.tier.capacity().limit, "it may be that they lie there"
    life.files[0].heal()
    life.put(0)
    life.put_all(range(20))
    assert life.good(range(20)) == set(range(20))
    assert life.tier.capacity().used == SEGMENT
    life.end()


def test_out_of_descriptors(tmp_path: Path) -> None:
    a_life(tmp_path)
    life = Life(tmp_path)
    gc.collect()  # what other tests have left would free descriptors in the middle of this
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        readings = {life.get(n) for n in (1, 99)}
        writing = life.put(200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert readings == {Reading.FAILED}
    assert writing == [Writing.FULL]
    life.clock.advance(10)
    assert life.put(200) == [Writing.STORED]
    assert life.good(SOME) == set(SOME)
    life.end()


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    life = Life(folder)
    life.put_all(range(10))
    shutil.rmtree(folder)
    life.good(range(10))
    for n in range(100, 300):
        life.put(n)
    assert life.tier.capacity().used <= 64 * MIB
    life.settle()
    life.tier.close()


def test_of_several_directories_the_well_ones_serve(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    life = Life(one, two)
    life.put_all(range(80))
    assert segments(one) and segments(two)
    assert life.good(range(80)) == set(range(80))
    life.files[0].fail(errno.EIO, "read", "write", "create")
    first = life.put(*range(100, 108)) + life.put(*range(108, 116))
    assert first.count(Writing.FAILED) == 8
    assert all(life.put(n) == [Writing.STORED] for n in range(200, 216)), "the sick one is not asked"
    assert len(life.good(range(80))) == 40
    life.files[0].heal()
    assert life.good(range(80)) == set(range(80))
    life.end()
    again = Life(one, two)
    assert again.good(range(80)) == set(range(80))
    again.end()


# lives of a file ------------------------------------------------------------------------------------------------------


def test_a_recycled_file_has_nothing_of_its_earlier_life(tmp_path: Path) -> None:
    a_life(tmp_path, range(4 * PER_SEGMENT))
    life = Life(tmp_path)
    oldest = {segment.name for segment in sorted(
        life.tier._directories[0].segments.values(), key=lambda segment: segment.sequence)[:1]}  # fmt: skip
    life.put_all(range(1000, 1016))
    (open_segment,) = [s for _, s in life.tier._segments.values() if s.phase.value == "open"]
    assert {open_segment.name} == oldest
    for n in range(PER_SEGMENT):  # as if the index were wrong about them
        assert not life.tier.lookup(life.id(n))
        life.tier._index.put(life.id(n), open_segment.number, 1 + n * (BLOCK // PAGE))
        assert life.get(n) in (Reading.DAMAGED, Reading.ABSENT)
    life.kill()
    again = Life(tmp_path)
    assert again.here(range(PER_SEGMENT)) == set(), "frames and footer behind the new ones are of another life"
    assert again.good(range(1000, 1016)) == set(range(1000, 1016))
    again.end()


def test_a_file_is_not_used_again_while_it_is_read(tmp_path: Path) -> None:
    a_life(tmp_path, range(4 * PER_SEGMENT))
    life = Life(tmp_path)
    entry = life.entry(3)
    answers: list[list[Reading]] = []
    life.tier.read([life.sealing.incoming(entry)], answers.append)
    (reading, done) = life.executor._jobs.pop()  # the read is under way for as long as the test likes
    life.put_all(range(1000, 1000 + 4 * PER_SEGMENT))
    reading()
    done(None)
    assert answers == [[Reading.GOOD]]
    life.put_all(range(2000, 2000 + 4 * PER_SEGMENT))
    assert len(segments(tmp_path)) == 4
    life.end()


def test_hot_blocks_survive_their_segment(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 20))
    hot = {3, 7, 11, 12}
    assert life.good(range(13)) >= hot
    written = life.tier.counts.device_bytes
    life2_blocks = range(1000, 1040)
    for n in range(13):
        if n not in hot:
            life.tier.drop(life.id(n))
    life.put_all(life2_blocks)
    counts = life.tier.counts
    assert counts.reinserted_blocks == len(hot)
    assert life.here(range(PER_SEGMENT)) == hot
    assert life.good(range(13)) == hot, "sealed anew, for another segment"
    amplified = counts.device_bytes - written - len(life2_blocks) * BLOCK
    assert len(hot) * BLOCK <= amplified <= len(hot) * BLOCK + 20 * PAGE, "it is counted"
    life.end()
    again = Life(tmp_path)
    assert again.good(range(13)) == hot
    again.end()


def test_at_most_a_tenth_is_written_again(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 20))
    life.good(range(PER_SEGMENT))
    life.put_all(range(1000, 1040))
    assert 0 < life.tier.counts.reinserted_blocks <= SEGMENT // 10 // BLOCK
    assert life.tier.counts.evicted_blocks >= PER_SEGMENT - SEGMENT // 10 // BLOCK - 1
    life.end()


def test_a_victim_that_cannot_be_read_does_not_hurt_the_segment_being_written(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 20))
    life.good(range(5))
    victim = min((s for _, s in life.tier._segments.values()), key=lambda s: s.sequence).name
    reads = 0

    def fault(operation: str, name: str, offset: int) -> None:
        nonlocal reads
        if operation == "read" and name == victim:
            reads += 1
            if reads > 2:  # its footer can be read, its blocks cannot
                raise OSError(errno.EIO, "I/O error")

    life.files[0].fault = fault
    life.put_all(range(1000, 1040))
    assert life.tier.counts.reinserted_blocks == 0
    life.files[0].heal()
    assert life.good(range(1000, 1040)) == set(range(1000, 1040))
    life.end()


# clearing and closing -------------------------------------------------------------------------------------------------


def test_cleared_is_gone_for_good(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(150))
    assert life.clear() == Forgotten(150, 3 * SEGMENT)
    assert not segments(tmp_path)
    assert life.tier.capacity().used == 0
    assert life.here(range(150)) == set()
    life.put_all(range(150, 160))
    life.end()
    again = Life(tmp_path)
    assert again.here(range(200)) == set(range(150, 160))
    again.end()


@pytest.mark.parametrize("seed", range(0, 18, 2))
def test_clearing_in_the_middle_of_everything(tmp_path: Path, seed: int) -> None:
    """Writes, evictions and reads are under way. Nothing of before comes back, nothing is lost of what comes after, and
    the books balance."""
    life = Life(tmp_path, seed=seed)
    life.put_all(range(4 * PER_SEGMENT - 20))
    assert life.good(range(5)) == set(range(5)), "they are hot"
    answers = [life.write(*range(first, first + 8)) for first in (1000, 1008, 1016, 1024)]
    for _ in range(2 * seed):
        life.executor.step()
    cleared: list[Forgotten] = []
    life.tier.clear(cleared.append)
    assert life.here(range(2000)) == set()
    more = life.write(*range(3000, 3004))
    life.executor.drain()
    assert len(cleared) == 1
    assert all(len(each) == 1 for each in (*answers, more))
    assert life.here(range(2000)) == set()
    assert life.good(range(3000, 3004)) == {
        3000 + at for at, writing in enumerate(more[0]) if writing is Writing.STORED
    }
    assert life.tier.capacity().used == sum(path.stat().st_size for path in segments(tmp_path))
    life.put_all(range(4000, 4300))
    assert life.tier.capacity().used <= 64 * MIB
    assert not life.tier._directories[0]._jobs
    life.end()
    again = Life(tmp_path)
    assert again.here(range(2000)) == set()
    again.end()


def test_hot_blocks_of_what_is_cleared_are_not_written_again(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 20))
    assert life.good(range(5)) == set(range(5)), "they are hot"
    eviction, n = life.tier._directories[0]._room.evictor, 1000
    while not eviction.busy:
        life.executor.drain()
        life.write(n)
        n += 1
    job, done = life.executor._jobs.pop()  # it reads the victim's footer, for as long as the test likes
    cleared: list[Forgotten] = []
    life.tier.clear(cleared.append)
    life.executor.drain()
    assert life.put(3000) == [Writing.STORED]
    assert not cleared, "a file is in use"
    job()
    done(None)
    life.executor.drain()
    assert len(cleared) == 1
    assert life.here(range(2000)) == set()
    assert life.tier.counts.reinserted_blocks == 0
    assert life.get(3000) is Reading.GOOD
    life.end()


def test_a_completion_that_comes_after_the_end_does_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(10))
    answers = life.write(*range(100, 108))
    life.tier.close()
    life.tier.close()
    life.executor.drain()
    assert answers == [[Writing.FAILED] * 8]
    again = Life(tmp_path)
    assert again.good(range(10)) == set(range(10))
    again.end()


def test_a_file_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    """A descriptor closed too early is another file's a moment later: a write would go there."""
    (tmp_path / "a").write_bytes(bytes(PAGE))
    files = SystemFiles(tmp_path)
    handles = Handles(files, 4)
    with handles.use("a") as first:
        with handles.use("a") as second:
            assert first is second
            handles.forget("a")
        assert first.size() == PAGE
        with handles.use("a") as third:
            assert third is not first
        handles.close()
        assert first.size() == PAGE
    with pytest.raises(OSError, match="descriptor"):
        first.size()
    files.close()


def test_files_are_used_by_many_threads_and_none_stays_open(tmp_path: Path) -> None:
    for n in range(12):
        (tmp_path / str(n)).write_bytes(bytes([n]) * PAGE)
    files = SystemFiles(tmp_path)
    handles = Handles(files, 3)
    wrong: list[int] = []

    def open_here() -> int:
        return sum(f" {tmp_path}/" in file for file in open_files())

    def work(seed: int) -> None:
        for turn in range(300):
            n = (seed * 7 + turn * 5) % 12
            with handles.use(str(n)) as file:
                if turn % 11 == 0:
                    handles.forget(str(n))
                if file.size() != PAGE:
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert open_here() <= 3
    handles.close()
    assert open_here() == 0
    files.close()
