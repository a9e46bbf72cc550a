"""What keeps a disk tier honest where two things happen at once, or where a file is not what it was made as."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disks import BLOCK, MIB, PER_SEGMENT, SEGMENT, Life, content, digest, segments

import golden
from stepwell.block.layout import PAGE
from stepwell.hierarchy.arena.records import Entry
from stepwell.io.files import SystemFiles
from stepwell.io.staging import Staging
from stepwell.tiers.base import Reading, Writing
from stepwell.tiers.disk import segment as segment_module
from stepwell.tiers.disk.layout import MAX_KEYS, RECORD, Footer, Head, Trailer
from stepwell.tiers.disk.recovery import look
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

Held = tuple[Callable[[], None], Callable[[BaseException | None], None]]
"""A job and its completion: under way for as long as a test likes."""


def a_life(folder: Path, numbers: range, **how: bool) -> None:
    """Leaves these blocks in closed segments."""
    life = Life(folder, **how)  # type: ignore[arg-type]
    life.put_all(numbers)
    life.end()


def run(held: Held) -> None:
    held[0]()
    held[1](None)


def a_read(life: Life, n: int) -> tuple[Held, list[list[Reading]]]:
    answers: list[list[Reading]] = []
    life.tier.read([life.sealing.incoming(life.entry(n))], answers.append)
    return life.executor._jobs.pop(), answers


def an_eviction(life: Life, n: int) -> Held:
    """Writes blocks from `n` on until room is made; what reads the victim's footer."""
    eviction = life.tier._directories[0]._room.evictor
    while not eviction.busy:
        life.executor.drain()
        life.write(n)
        n += 1
    held = life.executor._jobs.pop()
    life.executor.drain()
    assert eviction.busy
    return held


# two things at once ---------------------------------------------------------------------------------------------------


def test_an_emptied_segment_that_is_still_read_is_not_used_again(tmp_path: Path) -> None:
    """The read began while the segment was being emptied: what it reads stays until it has ended."""
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 20))
    names = {path.name for path in segments(tmp_path)}
    eviction = an_eviction(life, 1000)
    reading, answers = a_read(life, 3)
    run(eviction)
    life.executor.drain()
    assert not life.tier.lookup(life.id(2)), "the segment is empty"
    life.put_all(range(2000, 2000 + 2 * PER_SEGMENT))
    run(reading)
    assert answers == [[Reading.GOOD]]
    seen = len(life.files[0].seen)
    life.put_all(range(3000, 3000 + 4 * PER_SEGMENT))
    heads = {name for operation, name, offset in life.files[0].seen[seen:] if (operation, offset) == ("write", 0)}
    assert heads == names, "then it is used again as the others are"
    life.end()


def test_a_segment_that_is_being_read_is_not_emptied_while_there_is_another(tmp_path: Path) -> None:
    a_life(tmp_path, range(4 * PER_SEGMENT))
    life = Life(tmp_path)
    reading, answers = a_read(life, 3)
    life.put_all(range(1000, 1016))
    assert life.here(range(2 * PER_SEGMENT)) == set(range(PER_SEGMENT)), "the second goes instead"
    run(reading)
    assert answers == [[Reading.GOOD]]
    life.put_all(range(1016, 1016 + PER_SEGMENT))
    assert life.here(range(PER_SEGMENT)) <= {3}, "it is the oldest, and read by nobody"
    life.end()


def a_copy(folder: Path) -> tuple[Life, Held]:
    """Block 0 is hot and its segment is being emptied: the copy is written, and not yet known to be."""
    life = Life(folder)
    life.put_all(range(4 * PER_SEGMENT - 20))
    assert life.get(0) is Reading.GOOD
    run(an_eviction(life, 1000))
    ((job, done),) = life.executor._jobs
    life.executor._jobs.clear()
    job()
    return life, (lambda: None, done)


def test_a_copy_of_a_hot_block_is_found(tmp_path: Path) -> None:
    life, copied = a_copy(tmp_path)
    run(copied)
    life.executor.drain()
    assert life.tier.counts.reinserted_blocks == 1
    assert life.get(0) is Reading.GOOD
    life.end()


def test_a_block_that_is_dropped_while_it_is_copied_does_not_come_back(tmp_path: Path) -> None:
    life, copied = a_copy(tmp_path)
    life.tier.drop(life.id(0))
    run(copied)
    life.executor.drain()
    assert not life.tier.lookup(life.id(0))
    assert life.tier.counts.reinserted_blocks == 0
    life.end()


def test_a_block_that_is_written_while_it_is_copied_is_as_it_was_written_last(tmp_path: Path) -> None:
    life, copied = a_copy(tmp_path)
    entry, answers = life.entry(0), list[list[Writing]]()
    for shard, (slab, slot) in enumerate(entry.slots):
        slab.payload(slot)[:] = content(5000, shard)
    life.tier.write([life.sealing.outgoing(entry)], answers.append)
    life.executor.drain()
    assert answers == [[Writing.STORED]]
    run(copied)
    life.executor.drain()
    entry, readings = life.entry(0), list[list[Reading]]()
    life.tier.read([life.sealing.incoming(entry)], readings.append)
    life.executor.drain()
    assert readings == [[Reading.GOOD]]
    for shard, (slab, slot) in enumerate(entry.slots):
        assert (slab.payload(slot) == content(5000, shard)).all()
    life.end()


@pytest.mark.parametrize("blocks", [PER_SEGMENT + 8, 8], ids=["another segment", "the same segment"])
def test_a_read_that_finds_damage_does_not_hide_the_block_where_it_was_written_meanwhile(
    tmp_path: Path, blocks: int
) -> None:
    life = Life(tmp_path)
    life.put_all(range(blocks))
    path = segments(tmp_path)[0]
    with path.open("r+b") as file:
        file.seek(PAGE + 5 * BLOCK + BLOCK // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    (job, done), answers = a_read(life, 5)
    job()
    life.tier.drop(life.id(5))
    assert life.put(5) == [Writing.STORED]
    done(None)
    assert answers == [[Reading.DAMAGED]]
    assert life.tier.lookup(life.id(5))
    assert life.get(5) is Reading.GOOD
    life.end()


# files that were used before, or changed ------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [True, False])
def test_frames_of_a_files_earlier_life_are_no_blocks_of_its_open_segment(tmp_path: Path, sealed: bool) -> None:
    """They lie behind the new ones, whole and in step. Sealed, their keys are none that anybody has for this segment:
    it would be kept for ever."""
    a_life(tmp_path, range(4 * PER_SEGMENT), sealed=sealed)
    life = Life(tmp_path, sealed=sealed)
    life.put_all(range(1000, 1016))
    life.kill()
    name = segments(tmp_path)[-1].name
    again = Life(tmp_path, sealed=sealed)
    assert again.recovered == [3 * PER_SEGMENT + 16]
    assert again.tier.figures()["kept_segments"] == 0
    assert again.here(range(PER_SEGMENT)) == set()
    assert again.good(range(1000, 1016)) == set(range(1000, 1016))
    again.end()
    reads = sum((operation, of) == ("read", name) for operation, of, _ in again.files[0].seen)
    assert reads < 90, "nor are they looked at one by one"


def test_a_footer_in_a_file_of_another_size_is_not_believed(tmp_path: Path) -> None:
    """Somebody has cut it out and put it elsewhere: what counts then is what the frames say."""
    a_life(tmp_path, range(10))
    (path,) = segments(tmp_path)
    raw = bytearray(path.read_bytes())
    gone = PAGE + 4 * BLOCK
    raw[gone : gone + BLOCK] = bytes(BLOCK)
    path.write_bytes(raw[: PAGE + 10 * BLOCK] + raw[-2 * PAGE :])
    life = Life(tmp_path)
    assert life.recovered == [9]
    assert not life.tier.lookup(life.id(4))
    assert life.good(range(10)) == set(range(10)) - {4}
    life.end()


def test_what_a_trailer_claims_beyond_its_file_is_neither_read_nor_allocated(tmp_path: Path) -> None:
    """Its checksum is right: anybody could have made it."""
    a_life(tmp_path, range(10))
    (path,) = segments(tmp_path)
    raw = bytearray(path.read_bytes())
    trailer = Trailer.parse(bytes(raw[-PAGE:]))
    assert trailer is not None
    records = np.zeros(SEGMENT // RECORD.itemsize, RECORD)
    raw[-PAGE:] = Footer(trailer.segment, records, trailer.commitments).pack()[-PAGE:]
    path.write_bytes(raw)
    files, staging = SystemFiles(tmp_path), Staging(2 * MIB)
    found = look(files, path.name, staging)
    assert not found.closed
    assert found.footer is not None and len(found.footer.records) == 10
    with staging.lend(1) as buffer:
        assert len(buffer) == 2 * MIB, "as large as it was"
    files.close()


@pytest.mark.parametrize("pages", [1, 2, 3, 66])
def test_what_is_placed_leaves_room_for_the_footer_that_lists_it(pages: int) -> None:
    segment = Segment(1, "a name", bytes(16), 1, SEGMENT, SegmentPhase.OPEN)
    while segment.fits(pages * PAGE, bytes(32)):
        segment.take(pages * PAGE, 1, bytes(32))
    left = segment.nbytes - segment.end * PAGE - Footer.nbytes(segment.blocks)
    assert 0 <= left < pages * PAGE + PAGE


def test_a_segment_without_room_for_a_footer_is_recovered_without_one(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(8))
    life.kill()
    (path,) = segments(tmp_path)
    nbytes = PAGE + 8 * BLOCK
    raw = path.read_bytes()[:nbytes]
    head = Head.parse(raw[:PAGE])
    assert head is not None
    path.write_bytes(replace(head, nbytes=nbytes).pack() + raw[PAGE:])
    for _ in range(2):
        life = Life(tmp_path)
        assert life.recovered == [8]
        assert life.good(range(8)) == set(range(8)), "nothing is written over its last block"
        life.end()


def test_the_oldest_segment_goes_first_even_if_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_life(tmp_path, range(3 * PER_SEGMENT))
    monkeypatch.setattr(golden, "NOW", golden.NOW - 3600)
    life = Life(tmp_path)
    life.put_all(range(1000, 1000 + 2 * PER_SEGMENT + 40))
    assert life.here(range(2 * PER_SEGMENT)) == set(), "written in the life before"
    assert life.here(range(2 * PER_SEGMENT, 3 * PER_SEGMENT)) == set(range(2 * PER_SEGMENT, 3 * PER_SEGMENT))
    assert len(life.here(range(1000, 1000 + 2 * PER_SEGMENT + 40))) == 2 * PER_SEGMENT + 40
    life.end()


# keys -----------------------------------------------------------------------------------------------------------------

MANY = PER_SEGMENT
TENANTS = Keyring(
    (
        *golden.KEYRING.tenants,
        *(TenantKeys(f"tenant-{n}", (Epoch(1, bytes([n]) * 32),)) for n in range(MANY)),
    )
)


def of_a_tenant(life: Life, n: int) -> Entry:
    """A block of tenant n."""
    entry = life.entry(n)
    (entry.origin,) = life.sealing.origins(f"tenant-{n}", golden.NAMESPACE)
    entry.id = entry.origin.name(digest(n))
    return entry


def write_for_all(life: Life) -> None:
    """A block for each of more tenants than one segment may have keys of, and the segment has room for their blocks."""
    for n in range(MANY):
        entry, answers = of_a_tenant(life, n), list[list[Writing]]()
        for shard, (slab, slot) in enumerate(entry.slots):
            slab.payload(slot)[:] = content(n, shard)
        life.tier.write([life.sealing.outgoing(entry)], answers.append)
        life.executor.drain()
        assert answers == [[Writing.STORED]]


def good_for_all(life: Life) -> int:
    readings: list[list[Reading]] = []
    for n in range(MANY):
        life.tier.read([life.sealing.incoming(of_a_tenant(life, n))], readings.append)
        life.executor.drain()
    return readings.count([Reading.GOOD])


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_segment_takes_blocks_of_no_more_keys_than_its_footer_can_name(tmp_path: Path, killed: bool) -> None:
    assert MAX_KEYS < MANY <= PER_SEGMENT
    life = Life(tmp_path, keyring=TENANTS)
    write_for_all(life)
    assert good_for_all(life) == MANY
    if killed:
        life.kill()
    else:
        life.end()
    assert len(segments(tmp_path)) == 2
    for _ in range(2):
        again = Life(tmp_path, keyring=TENANTS)
        assert again.recovered == [MANY]
        assert good_for_all(again) == MANY
        again.end()


def test_an_open_segment_with_more_keys_than_a_footer_can_name_is_recovered_as_far_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as another_writer:
        another_writer.setattr(segment_module, "MAX_KEYS", 1000)
        life = Life(tmp_path, keyring=TENANTS)
        write_for_all(life)
        life.kill()
    assert len(segments(tmp_path)) == 1
    for _ in range(2):
        again = Life(tmp_path, keyring=TENANTS)
        assert again.recovered == [MAX_KEYS]
        assert good_for_all(again) == MAX_KEYS
        again.end()
    scanned = [operation for operation, _, _ in Life(tmp_path, keyring=TENANTS).files[0].seen if operation == "read"]
    assert len(scanned) <= 4, "its footer is read"
    assert segments(tmp_path)[0].stat().st_size == SEGMENT < 64 * MIB
