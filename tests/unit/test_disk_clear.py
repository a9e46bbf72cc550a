"""Clearing one namespace from disk: what goes is gone for good, what is not of it stays, whatever goes on meanwhile."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
from disks import BLOCK, MIB, PER_SEGMENT, SEGMENT, SPACE, FaultyFiles, Life, failure, segments
from test_disk_faults import poke

import golden
from lab.sim.disk import Disk
from lab.sim.fibres import Fibres
from lab.sim.files import SimFiles
from lab.sim.trace import Trace
from stepwell.block.layout import PAGE
from stepwell.io.executor import Done, Job
from stepwell.io.files import SystemFiles
from stepwell.ops.fsck import examine
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.tier_kit import NAMESPACE, OTHER, AnyKeys, Hands, block_id
from stepwell.tiers.base import Forgotten, Reading, Writing
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.tier import DiskTier, Site
from stepwell.vault import keyring as vault
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

ONE, TWO = range(SPACE), range(SPACE, 2 * SPACE)


def mixed(count: int, first: int = 0) -> list[int]:
    """Numbers of two namespaces, one by one in turn: `count` of each."""
    return [n + space for n in range(first, first + count) for space in (0, SPACE)]


def put(life: Life, numbers: list[int]) -> None:
    for at in range(0, len(numbers), 8):
        assert set(life.put(*numbers[at : at + 8])) == {Writing.STORED}


def find(life: Life, numbers: list[int]) -> set[int]:
    return {n for n in numbers if life.get(n) is Reading.GOOD}


def of(phase: SegmentPhase, life: Life) -> list[Segment]:
    return [segment for _, segment in life.tier._segments.values() if segment.phase is phase]


def begin(life: Life, space: int) -> list[Forgotten]:
    cleared: list[Forgotten] = []
    life.tier.clear(cleared.append, life.tag(space))
    return cleared


def no_footers(folder: Path) -> None:
    for path in segments(folder):
        poke(path, path.stat().st_size - PAGE, bytes(PAGE))


def raw(life: Life, folder: Path, numbers: list[int]) -> set[int]:
    """Those of which some file has a frame, of whatever life, or a record in whatever is left of a footer."""
    ids = {bytes(life.id(n)): n for n in numbers}
    begins = np.zeros(1 << 16, bool)  # of an id: whether there is one with these two first bytes
    begins[[int.from_bytes(id[:2], "little") for id in ids]] = True
    found = set()
    for path in folder.glob("*.seg"):
        rows = np.fromfile(path, "V32")
        likely = begins[rows.view("<u2")[:: 32 // 2]]
        found |= {ids[row] for row in map(bytes, rows[likely]) if row in ids}
    return found


def another(life: Life, folder: Path, how: str) -> Life:
    """The next life: after a good end, a kill, or with every footer lost."""
    if how == "end":
        life.end()
    else:
        life.kill()
    if how == "scan":
        no_footers(folder)
    return Life(folder, limit=life.tier.capacity().limit)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("how", ["end", "kill", "scan"])
def test_one_namespace_goes_for_good_and_no_other(tmp_path: Path, how: str, zeros: bool) -> None:
    life = Life(tmp_path, limit=256 * MIB)
    life.files[0].zeros = zeros
    numbers = mixed(100)
    put(life, numbers)
    written = life.tier.counts.device_bytes
    assert life.clear(0) == Forgotten(100, 100 * BLOCK)
    assert (life.tier.counts.device_bytes - written > 100 * BLOCK) is not zeros
    assert life.here(range(100)) == set(), "no lookup finds them"
    assert raw(life, tmp_path, numbers) == {n for n in numbers if n in TWO}, "nothing of them lies there"
    assert life.good(range(SPACE, SPACE + 100)) == set(range(SPACE, SPACE + 100))
    assert life.clear(0) == Forgotten()
    life = another(life, tmp_path, how)
    assert find(life, numbers) == {n for n in numbers if n in TWO}
    assert life.here(range(100)) == set(), "no restart finds them"
    assert not life.troubles
    life.put_all(range(200, 250))
    life.end()


def test_what_is_left_is_good_in_the_eyes_of_fsck(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    life = Life(tmp_path / "disk")
    put(life, mixed(60))
    life.clear(0)
    life.end()
    keyring = tmp_path / "keyring"
    keyring.touch(0o600)
    keyring.write_bytes(vault._render([vault._TenantRecord("default", [vault._EpochRecord(1, golden.EPOCH.key)])]))
    report = examine(tmp_path / "disk", keyring)
    assert report.ok and not report.segments["open"]
    assert report.blocks == {"good": 60}


def test_its_own_segments_are_deleted(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(2 * PER_SEGMENT))
    life.put_all(range(SPACE, SPACE + 10))
    used = life.tier.capacity().used
    assert life.clear(0) == Forgotten(2 * PER_SEGMENT, 2 * PER_SEGMENT * BLOCK)
    assert used - life.tier.capacity().used == 2 * SEGMENT
    assert len(segments(tmp_path)) == 1
    life.put_all(range(300, 300 + 2 * PER_SEGMENT))
    assert life.good(range(SPACE, SPACE + 10)) == set(range(SPACE, SPACE + 10))
    life.end()


def test_others_behind_a_long_gap_are_found_without_a_footer(tmp_path: Path) -> None:
    """A sweep leaves more zeros than writes that were under way ever left gaps."""
    life = Life(tmp_path, limit=64 * 64 * MIB)
    life.put_all(range(SPACE, SPACE + 4))
    life.put_all(range(180))
    life.put_all(range(SPACE + 4, SPACE + 8))
    assert len(segments(tmp_path)) == 1
    assert life.clear(0) == Forgotten(180, 180 * BLOCK)
    assert raw(life, tmp_path, list(range(180))) == set(), "nor in what was the beginning of a longer footer"
    life = another(life, tmp_path, "scan")
    assert life.good(range(SPACE, SPACE + 8)) == set(range(SPACE, SPACE + 8))
    assert life.here(range(180)) == set()
    life.end()


def test_the_files_keep_their_space(tmp_path: Path) -> None:
    """A hole would have to be filled from what is reserved for others."""
    life = Life(tmp_path)
    put(life, mixed(20))
    (path,) = segments(tmp_path)
    before = path.stat().st_blocks
    life.clear(0)
    assert path.stat().st_blocks >= before
    life.end()


@pytest.mark.parametrize("how", ["kill", "scan"])
def test_files_that_wait_for_another_life_have_nothing_of_it(tmp_path: Path, how: str) -> None:
    """An evicted segment's file still has all it had, its footer too: a restart finds it."""
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 20))
    life.put_all(range(SPACE, SPACE + 10))
    assert len(of(SegmentPhase.FREE, life)) == 1
    life.clear(0)
    life = another(life, tmp_path, how)
    assert life.here(ONE) == set()
    assert life.good(range(SPACE, SPACE + 10)) == set(range(SPACE, SPACE + 10))
    life.end()


@pytest.mark.parametrize("namespace", [True, False])
def test_a_file_that_begins_another_life_is_waited_for(tmp_path: Path, namespace: bool) -> None:
    """Until its new head is written, its old one counts."""
    life = Life(tmp_path)
    life.put_all(range(4 * PER_SEGMENT - 10))
    (free,) = of(SegmentPhase.FREE, life)
    n = 1000
    while free.phase is SegmentPhase.FREE:
        life.write(n)
        n += 1
        while free.phase is SegmentPhase.FREE and life.executor.step():
            pass
    assert free.phase is SegmentPhase.BEGINNING
    (prepare,) = [job for job in life.executor._jobs if "_prepare" in job[0].__qualname__]
    life.executor._jobs.remove(prepare)
    cleared: list[Forgotten] = []
    life.tier.clear(cleared.append, life.tag(0) if namespace else b"")
    life.executor.drain()
    assert not cleared
    prepare[0]()
    prepare[1](None)
    life.executor.drain()
    assert len(cleared) == 1
    life.kill()
    life = Life(tmp_path)
    assert life.here(range(n)) == set()
    life.end()


def held_eviction(life: Life, part: str) -> tuple[Job, Done]:
    """Writes until an eviction's job of this name waits to run, and takes it away from the executor."""
    n = 1000
    while True:
        for job in life.executor._jobs:
            if f"Evictor.{part}." in job[0].__qualname__:
                life.executor._jobs.remove(job)
                return job
        if not life.executor.step():
            life.write(n)
            n += 1


@pytest.mark.parametrize("part", ["begin", "_copy"])
@pytest.mark.parametrize("how", ["end", "kill", "scan"])
def test_hot_blocks_of_it_do_not_outlive_their_segment(tmp_path: Path, part: str, how: str) -> None:
    """They are being copied into the open segment, or are about to be into the next one."""
    life = Life(tmp_path)
    put(life, mixed(4 * PER_SEGMENT // 2 - 10))
    numbers = mixed(3)
    assert find(life, numbers) == set(numbers), "they are hot"
    job, done = held_eviction(life, part)
    cleared = begin(life, 0)
    life.tier._directories[0].space.limit += SEGMENT  # so that there can be a next one meanwhile
    later = life.write(2 * SPACE)
    life.executor.drain()
    assert not cleared, "its segment is not empty yet"
    assert life.tier._directories[0].open_segment is not None
    job()
    done(None)
    life.executor.drain()
    assert len(cleared) == 1 and later == [[Writing.STORED]]
    assert life.here(range(SPACE)) == set()
    hot = {n for n in numbers if n in TWO}
    assert life.here(range(SPACE, SPACE + 3)) >= hot or part == "begin"
    life = another(life, tmp_path, how)
    assert life.here(range(SPACE)) == set()
    assert find(life, sorted(hot)) == hot or part == "begin"
    assert life.get(2 * SPACE) is Reading.GOOD
    life.end()


def test_reads_that_have_begun_end_before_the_frames_go(tmp_path: Path) -> None:
    """They end with what was written: nothing is taken for damage. Others go on meanwhile, and are not waited for."""
    life = Life(tmp_path)
    put(life, mixed(20))
    life.put_all(range(SPACE + 100, SPACE + 150))
    answers: list[list[Reading]] = []
    life.tier.read([life.sealing.incoming(life.entry(3))], answers.append)
    (reading, done) = life.executor._jobs.pop()
    cleared = begin(life, 0)
    life.executor.drain()
    assert not cleared
    assert life.here(range(20)) == set()
    assert life.get(3) is Reading.ABSENT
    later: list[list[Reading]] = []
    life.tier.read([life.sealing.incoming(life.entry(SPACE + 3))], later.append)
    (other, other_done) = life.executor._jobs.pop()
    reading()
    done(None)
    life.executor.drain()
    assert answers == [[Reading.GOOD]]
    assert len(cleared) == 1, "reads that began later keep nobody waiting"
    other()
    other_done(None)
    assert later == [[Reading.GOOD]]
    assert not life.tier.counts.errors
    life.end()


@pytest.mark.parametrize("how", ["end", "kill", "scan"])
def test_writes_that_have_a_place_go_and_those_that_wait_get_none(tmp_path: Path, how: str) -> None:
    life = Life(tmp_path)
    life.put_all(range(8))
    placed = life.write(*range(8, 12), *range(SPACE, SPACE + 4))
    waiting = life.write(*range(12, 12 + PER_SEGMENT - 1), *range(SPACE + 4, SPACE + 8))
    cleared = begin(life, 0)
    after = life.write(*range(100, 104))
    life.executor.drain()
    assert len(cleared) == 1
    assert placed == [[Writing.STORED] * 8]
    assert Writing.FULL in waiting[0][:-4] and waiting[0][-4:] == [Writing.STORED] * 4
    assert after == [[Writing.STORED] * 4]
    kept = {*range(100, 104), *range(SPACE, SPACE + 8)}
    numbers = [*range(200), *range(SPACE, SPACE + 20)]
    assert find(life, numbers) == kept
    life = another(life, tmp_path, how)
    assert find(life, numbers) == kept
    assert {n for n in numbers if life.tier.lookup(life.id(n))} == kept
    life.end()


def test_a_block_that_was_written_again_meanwhile_stays(tmp_path: Path) -> None:
    """Its old frames go, and the index says where the new ones are."""
    life = Life(tmp_path)
    put(life, mixed(10))
    cleared = begin(life, 0)
    again = life.write(3)
    while not again:
        life.executor.step()
    life.executor.drain()
    assert cleared[0].blocks in (9, 10)
    assert life.good(range(10)) == {3}
    life.end()


@pytest.mark.parametrize("space", [0, None])
def test_a_write_that_ends_after_a_later_one_does_not_hide_it(tmp_path: Path, space: int | None) -> None:
    """The same block is written before the clear and after it, and the first write takes longer."""
    life = Life(tmp_path)
    life.put_all(range(SPACE, SPACE + 8))
    first = life.write(3)
    (job, done) = life.executor._jobs.pop()
    cleared: list[Forgotten] = []
    life.tier.clear(cleared.append, life.tag(space) if space is not None else b"")
    assert life.put(3) == [Writing.STORED]
    job()
    done(None)
    life.executor.drain()
    assert first == [[Writing.STORED]] and len(cleared) == 1
    assert life.get(3) is Reading.GOOD
    life.end()


@pytest.mark.parametrize("footers", [True, False])
def test_segments_of_lost_keys_are_swept_too(tmp_path: Path, footers: bool) -> None:
    """Whose a block is its record says; what else is there stays until its keys are back."""
    both = Keyring((*golden.KEYRING.tenants, TenantKeys("lost", (Epoch(1, b"a key that will be lost one day!"),))))
    life = Life(tmp_path, keyring=both)
    put(life, mixed(20))
    (lost,) = life.sealing.origins("lost", golden.NAMESPACE)
    life.origins[2] = lost
    life.put_all(range(2 * SPACE, 2 * SPACE + 20))
    life.end()
    if not footers:
        no_footers(tmp_path)
    life = Life(tmp_path)
    assert life.tier.figures()["kept_segments"] == 1
    assert life.clear(0) == Forgotten(20, 20 * BLOCK)
    assert life.here(ONE[:20]) == set()
    assert life.good(range(SPACE, SPACE + 20)) == set(range(SPACE, SPACE + 20))
    life.kill()
    life = Life(tmp_path, keyring=both)
    life.origins[2] = lost
    assert life.here(ONE[:20]) == set()
    numbers = [*range(SPACE, SPACE + 20), *range(2 * SPACE, 2 * SPACE + 20)]
    assert find(life, numbers) == set(numbers)
    life.kill()
    life = Life(tmp_path)
    life.origins[2] = lost
    assert life.clear(2).nbytes == 20 * BLOCK, "and of what nobody here can open"
    life.kill()
    life = Life(tmp_path)
    assert life.tier.figures()["kept_segments"] == 0, "nothing needs that key any more"
    assert life.good(range(SPACE, SPACE + 20)) == set(range(SPACE, SPACE + 20))
    life.end()


@pytest.mark.parametrize("seed", range(4))
def test_it_waits_until_it_is_known_what_lies_there(tmp_path: Path, seed: int) -> None:
    """Footers of segments that were left open are written at that time."""
    life = Life(tmp_path)
    put(life, mixed(100))
    life.kill()
    no_footers(tmp_path)
    life = Life(tmp_path, recovers=False, seed=seed)
    cleared = begin(life, 0)
    life.tier.recover(life.recovered.append)
    life.executor.drain()
    assert cleared == [Forgotten(100, 100 * BLOCK)]
    assert life.here(ONE[:100]) == set()
    life.kill()
    life = Life(tmp_path)
    assert life.here(ONE[:100]) == set(), "the footers are those of after"
    assert len(life.good(range(SPACE, SPACE + 100))) == 100
    life.end()


@pytest.mark.parametrize("seed", range(6))
def test_several_clears_at_once(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, seed=seed)
    put(life, mixed(80))
    life.put_all(range(2 * SPACE, 2 * SPACE + 20))
    answers = [begin(life, 0)]
    for _ in range(seed):
        life.executor.step()
    answers += [begin(life, 1), begin(life, 0)]
    life.executor.drain()
    assert [len(each) for each in answers] == [1, 1, 1]
    assert answers[0][0].blocks + answers[2][0].blocks == 80
    assert answers[1][0].blocks == 80
    assert len(life.good(range(2 * SPACE, 2 * SPACE + 20))) == 20
    life.kill()
    life = Life(tmp_path)
    assert find(life, [*mixed(80), 2 * SPACE]) == {2 * SPACE}
    life.end()


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_with_a_clear_of_everything(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, seed=seed)
    put(life, mixed(100))
    calls: list[Forgotten] = []
    order = [b"", life.tag(0), life.tag(1)]
    random.Random(seed).shuffle(order)
    for tag in order:
        life.tier.clear(calls.append, tag)
        for _ in range(seed):
            life.executor.step()
    life.executor.drain()
    assert len(calls) == 3 and all(forgotten.whole for forgotten in calls)
    assert life.tier.capacity().used == sum(path.stat().st_size for path in segments(tmp_path)) == 0
    assert not life.tier._directories[0].busy
    life.put_all(range(300, 400))
    life.end()
    life = Life(tmp_path)
    assert life.recovered == [100]
    life.end()


# what goes wrong ------------------------------------------------------------------------------------------------------


def failing(folder: Path, numbers: list[int], operation: str) -> Life:
    """A life in which this operation fails for one of the segments."""
    life = Life(folder)
    put(life, numbers)
    life.settle()
    bad = segments(folder)[0].name

    def fault(what: str, name: str, offset: int) -> None:
        if what == operation and name == bad and (what != "write" or offset):
            raise failure(errno.EIO)

    life.files[0].fault = fault
    return life


@pytest.mark.parametrize("operation", ["open", "read", "zero", "write", "sync"])
def test_a_device_that_says_no_is_told_of_and_holds_nobody_up(tmp_path: Path, operation: str) -> None:
    numbers = mixed(100)
    life = failing(tmp_path, numbers, operation)
    forgotten = life.clear(0)
    assert not forgotten.whole
    assert forgotten.blocks >= 60, "other segments are swept"
    again = operation in ("open", "sync")  # and when all files are synced at the end
    assert sum(life.tier.counts.errors.values()) == 1 + again
    life.files[0].heal()
    assert life.good(range(SPACE, SPACE + 100)) == set(range(SPACE, SPACE + 100))
    again = life.clear(0)
    assert again.whole
    life.kill()
    life = Life(tmp_path)
    assert life.here(range(100)) == set(), "the second time all is well"
    assert life.good(range(SPACE, SPACE + 100)) == set(range(SPACE, SPACE + 100))
    life.end()


def test_nothing_is_looked_up_from_the_moment_of_a_clear_on(tmp_path: Path) -> None:
    """Blocks go from the index segment by segment, and this is the moment before the second of two."""
    life, some = Life(tmp_path), range(PER_SEGMENT + 8)
    life.put_all(some)
    assert life.here(some) == set(some)
    life.tier.clear(lambda forgotten: None)
    assert life.here(some) == set()
    life.executor.drain()
    life.end()


SYNC = ("sync", "")  # of the directory


def test_a_receipt_comes_when_the_directory_is_synced(tmp_path: Path) -> None:
    """Files that were unlinked may be back after a power cut until then."""
    life = Life(tmp_path)
    life.put_all(range(8))
    assert life.clear().blocks == 8
    done = [
        operation for operation, name, _ in life.files[0].seen if operation == "unlink" or (operation, name) == SYNC
    ]
    assert done[-1] == "sync" and "unlink" in done
    life.end()


@pytest.mark.parametrize("space", [None, 0])
def test_one_file_of_several_that_cannot_be_deleted_is_told_of(tmp_path: Path, space: int | None) -> None:
    """Found by the simulation: what went after it, one at a time, made it forgotten."""
    life = Life(tmp_path)
    life.put_all(range(3 * PER_SEGMENT))
    life.files[0].fail(errno.EIO, "unlink", only=1)
    assert not life.clear(space).whole
    assert len(segments(tmp_path)) == 1
    assert life.clear(space).whole
    assert not segments(tmp_path)
    life.end()


def test_a_file_that_cannot_be_deleted_is_told_of(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(10))
    life.files[0].fail(errno.EIO, "unlink")
    assert not life.clear(0).whole
    life.files[0].heal()
    life.end()


@pytest.mark.parametrize("namespace", [NAMESPACE, b""])
def test_what_was_written_over_before_a_clear_does_not_come_back_with_a_power_cut(namespace: bytes) -> None:
    """Found by the simulation: a segment with another life has nothing of the namespace any more, and the power cut
    loses that life's head and footer."""
    dice, disk = random.Random(1), Disk(1 << 30)
    segment = 64 * PAGE

    def life(disk: Disk) -> Hands:
        executor = SeededExecutor(1)
        files = SimFiles(disk, dice, Fibres(dice), Trace(), {})
        tier = DiskTier([Site(files, 4 * segment, 0, segment)], executor, SetClock(), lambda: golden.NOW, AnyKeys())
        tier.recover(lambda blocks: None)
        executor.drain()
        return Hands(tier, executor, 4 * PAGE)

    hands, mine = life(disk), range(40)
    for n in mine:
        hands.write(n)
    assert sum(hands.has(n) for n in mine) > 30
    disk.sync()
    for n in range(100, 200):
        hands.write(n, namespace=OTHER)
    assert not any(hands.has(n) for n in mine), "all of its segments have another life"
    assert hands.clear(namespace).whole
    for _ in range(100):
        again = life(disk.after_power_cut(dice))
        assert not any(again.tier.lookup(block_id(n)) for n in mine)


def test_a_clear_that_a_power_cut_ended_is_whole_the_next_time() -> None:
    """Wherever it was cut: no footer is there without what it hides having become zeros."""
    dice, disk = random.Random(1), Disk(1 << 30)
    states: list[Disk] = []

    def begin(disk: Disk, *, cut: bool = False) -> Life:
        files = SimFiles(disk, dice, Fibres(dice), Trace(), {})
        life, meet = Life(simulated=[files], segment=3 * MIB), files.meet

        def met(operation: str, name: str, *facts: object) -> None:
            if operation in ("zero", "write", "sync"):
                states.extend(disk.after_power_cut(dice) for _ in range(8))
            meet(operation, name, *facts)

        if cut:
            files.meet = met  # type: ignore[method-assign]
        return life

    life = begin(disk)
    put(life, mixed(4))
    life.settle()
    for inode in disk.names.values():
        inode.sync()
    disk.sync()
    assert begin(disk, cut=True).clear(0).whole
    assert len(states) >= 32
    for state in states:
        again = begin(state)
        assert again.clear(0).whole
        again.settle()
        for inode in state.names.values():
            inode.data[-100] ^= 1  # its footer is not believed any more
        last = begin(state)
        assert last.here(range(4)) == set()
        assert last.good(range(SPACE, SPACE + 4)) == set(range(SPACE, SPACE + 4))
        for each in (again, last):
            each.close_memory()


def test_a_footer_is_written_when_what_it_hides_is_zeros_on_disk(tmp_path: Path) -> None:
    """That of a segment which an earlier life left open."""
    life = Life(tmp_path)
    put(life, mixed(4))
    life.kill()
    life = Life(tmp_path)
    done = [operation for operation, _, _ in life.files[0].seen if operation in ("zero", "sync", "write")]
    assert done == ["zero", "sync", "write"]
    life.end()


@pytest.mark.parametrize("space", [None, 0])
def test_a_file_that_could_not_be_deleted_goes_with_the_next_clear(tmp_path: Path, space: int | None) -> None:
    """Found by the simulation: the next clear said that all was gone, and the next life found it."""
    life = Life(tmp_path)
    put(life, list(range(10)))
    life.files[0].fail(errno.EROFS, "unlink")
    assert not life.clear(space).whole
    assert not life.clear(space).whole, "it is tried again, and lies there still"
    life.files[0].heal()
    assert life.clear(space).whole
    assert not segments(tmp_path)
    life.end()
    assert Life(tmp_path).here(range(10)) == set()


def test_a_file_that_was_not_looked_at_is_told_of(tmp_path: Path) -> None:
    life = Life(tmp_path)
    put(life, mixed(100))
    life.end()
    bad = segments(tmp_path)[0].name

    def fault(files: FaultyFiles) -> None:
        def fails(operation: str, name: str, offset: int) -> None:
            if operation == "open" and name == bad:
                raise failure(errno.EIO)

        files.fault = fails

    life = Life(tmp_path, fault=fault)
    assert not life.clear(0).whole
    life.end()


@pytest.mark.parametrize("space", [None, 0])
def test_a_file_that_may_be_ours_is_told_of(tmp_path: Path, space: int | None) -> None:
    """Found by the simulation: both ends of a segment were misread, the clear said that all was gone, and the next life
    read them well."""
    life = Life(tmp_path)
    put(life, mixed(10))
    life.end()
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:-PAGE] + bytes([data[-PAGE] ^ 1]) + data[1 - PAGE :])
    life = Life(tmp_path)
    assert not life.clear(space).whole
    life.end()
    path.write_bytes(data)
    life = Life(tmp_path)
    assert life.here(mixed(10)), "that is why"
    assert life.clear(space).whole, "it is known by now"
    life.end()


def test_files_that_cannot_be_ours_are_none_of_a_clears_business(tmp_path: Path) -> None:
    life = Life(tmp_path)
    put(life, mixed(10))
    life.end()
    (tmp_path / "aaaaaaaaaaaaaaaa.seg").write_bytes(b"a note")
    (tmp_path / "notes.txt").write_bytes(b"another" * PAGE)
    life = Life(tmp_path)
    assert life.clear(None).whole
    life.end()


def test_files_that_somebody_has_deleted_are_gone(tmp_path: Path) -> None:
    life = Life(tmp_path)
    put(life, mixed(100))
    segments(tmp_path)[0].unlink()
    assert life.clear(0).whole
    assert life.here(ONE[:100]) == set()
    assert life.tier.capacity().used == sum(path.stat().st_size for path in segments(tmp_path))
    assert not life.troubles
    life.end()


def test_a_file_that_somebody_put_in_its_place_is_left_alone(tmp_path: Path) -> None:
    life = Life(tmp_path)
    put(life, mixed(20))
    life.settle()
    (path,) = segments(tmp_path)
    path.unlink()
    path.write_bytes(b"precious" * 1000)
    assert not life.clear(0).whole
    assert path.read_bytes() == b"precious" * 1000
    life.kill()


@pytest.mark.parametrize("how", ["end", "kill", "scan"])
def test_what_no_footer_lists_goes_too(tmp_path: Path, how: str) -> None:
    """A write that failed halfway has left whole blocks, and one that found no room in the index all of its own."""
    life = Life(tmp_path)
    life.put_all(range(SPACE, SPACE + 8))
    life.files[0].fail(errno.EIO, "write", only=2)
    assert life.put(*range(16)) == [Writing.FAILED] * 16
    life.files[0].heal()
    life.clock.advance(10)
    assert raw(life, tmp_path, list(range(16))), "there is something of them"
    life.put_all(range(SPACE + 8, SPACE + 16))
    life.tier._index._most = len(life.tier._index)
    assert life.put(20) == [Writing.FULL]
    assert raw(life, tmp_path, [20]) == {20}
    life.clear(0)
    assert raw(life, tmp_path, list(range(21))) == set()
    life = another(life, tmp_path, how)
    assert life.here(range(21)) == set()
    assert life.good(range(SPACE, SPACE + 16)) == set(range(SPACE, SPACE + 16))
    life.end()


@pytest.mark.parametrize("when", ["sweep", "recovery"])
def test_what_was_misread_goes_too(tmp_path: Path, when: str) -> None:
    """A footer and a frame's header come wrong from the disk, once: when it is cleared, or in the recovery before."""
    life = Life(tmp_path)
    mine = range(20 if when == "sweep" else 1)  # of others there must be nothing to do
    put(life, [*mine, *range(SPACE, SPACE + 20)])
    if when == "sweep":
        life.settle()
    (path,) = segments(tmp_path)

    def misread(operation: str, name: str, offset: int) -> str | None:
        return "flip" if operation == "read" and offset in (PAGE, path.stat().st_size - PAGE) else None

    if when == "recovery":
        life.kill()
        life = Life(tmp_path, fault=lambda files: setattr(files, "fault", misread))
        assert not life.tier.lookup(life.id(0)), "it is not seen"
        life.files[0].heal()
    else:
        life.files[0].fault = misread
    assert life.clear(0).whole
    assert raw(life, tmp_path, list(mine)) == set()
    life.files[0].heal()
    life = another(life, tmp_path, "scan")
    assert life.here(mine) == set()
    assert life.good(range(SPACE, SPACE + 20)) == set(range(SPACE, SPACE + 20))
    life.end()


@pytest.mark.parametrize("at", range(8))
def test_a_kill_in_the_middle_of_a_sweep_costs_no_other_block(tmp_path: Path, at: int) -> None:
    """After so many changes of the files nothing more is done."""
    life = Life(tmp_path)
    put(life, mixed(100))
    life.settle()
    done = 0

    def fault(operation: str, name: str, offset: int) -> str | None:
        nonlocal done
        if operation in ("zero", "write", "unlink", "sync"):
            done += 1
            if done > at:
                raise failure(errno.EBADF)
        return None

    life.files[0].fault = fault
    begin(life, 0)
    life.executor.drain()
    life.kill()
    life = Life(tmp_path)
    assert life.good(range(SPACE, SPACE + 100)) == set(range(SPACE, SPACE + 100))
    assert life.clear(0).whole
    assert raw(life, tmp_path, list(range(100))) == set()
    life.end()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numbers", [mixed(100), list(range(100))])
def test_a_good_end_waits_for_it(tmp_path: Path, numbers: list[int], seed: int) -> None:
    life = Life(tmp_path, seed=seed)
    put(life, numbers)
    order: list[str] = []
    life.tier.clear(lambda forgotten: order.append("cleared"), life.tag(0))
    life.tier.settle(lambda: order.append("settled"))
    life.executor.drain()
    assert order == ["cleared", "settled"]
    life.tier.close()


def test_a_file_that_was_cut_gets_no_footer_over_its_last_block(tmp_path: Path) -> None:
    life = Life(tmp_path)
    put(life, mixed(20))
    life.end()
    os.truncate(segments(tmp_path)[0], PAGE + 8 * BLOCK)
    life = Life(tmp_path)
    assert life.clear(0) == Forgotten(4, 4 * BLOCK)
    life = another(life, tmp_path, "kill")
    assert find(life, mixed(20)) == set(range(SPACE, SPACE + 4))
    life.end()


def test_a_file_that_was_copied_and_put_back_is_swept_as_it_lies_there(tmp_path: Path) -> None:
    """And not the one that has its place no more, but is open still."""
    life = Life(tmp_path)
    put(life, mixed(20))
    life.settle()
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    assert life.clear(0) == Forgotten(20, 20 * BLOCK)
    life.kill()
    life = Life(tmp_path)
    assert find(life, mixed(20)) == set(range(SPACE, SPACE + 20))
    assert life.here(ONE[:20]) == set()
    life.end()


@pytest.mark.parametrize("how", ["end", "scan"])
def test_a_hot_block_that_was_dropped_while_it_was_copied_goes_too(tmp_path: Path, how: str) -> None:
    """Nobody finds its new frames, but for who looks at frames."""
    life = Life(tmp_path)
    put(life, mixed(4 * PER_SEGMENT // 2 - 10))
    assert find(life, mixed(1)) == {0, SPACE}
    job, done = held_eviction(life, "_copy")
    life.tier.drop(life.id(0))
    job()
    done(None)
    life.executor.drain()
    assert raw(life, tmp_path, [0]) == {0}
    life.clear(0)
    assert raw(life, tmp_path, [0]) == set()
    life = another(life, tmp_path, how)
    assert life.here(ONE[:1]) == set()
    life.end()


@pytest.mark.parametrize("zeros", [True, False])
def test_a_range_of_a_file_is_zeros_afterwards(tmp_path: Path, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not zeros:
        monkeypatch.setattr("stepwell.io.files._fallocate", lambda *arguments: errno.EOPNOTSUPP)
    data = os.urandom(3 * MIB)
    (tmp_path / "a").write_bytes(data)
    files = SystemFiles(tmp_path)
    with files.open("a") as file:
        written = file.zero(PAGE, 2 * MIB + PAGE)
        assert written in ((0, 2 * MIB + PAGE) if zeros else (2 * MIB + PAGE,))
        file.sync()
    files.sync()
    assert (tmp_path / "a").read_bytes() == data[:PAGE] + bytes(2 * MIB + PAGE) + data[2 * MIB + 2 * PAGE :]
    files.close()


# anything in any order ------------------------------------------------------------------------------------------------


class Story:
    """A tier of two directories, and what must and what must not be found in it: `sure` were stored, and `gone` were
    cleared, since they were last written or cleared. Of the others nobody can tell."""

    def __init__(self, folders: list[Path], seed: int, limit: int) -> None:
        self.chance = random.Random(seed)
        self.folders, self.limit = folders, limit
        self.numbers: set[int] = set()
        self.sure: set[int] = set()
        self.gone: set[int] = set()
        self.clears: list[set[int]] = []  # under way: what each will have cleared
        self.writes: list[set[int]] = []  # under way: what each will have stored for sure
        self.ended = self.reading = 0
        self.life = self._begin()

    def _begin(self) -> Life:
        life = Life(*self.folders, limit=self.limit, seed=self.chance.randrange(1 << 30))
        for files in life.files:
            files.zeros = self.chance.random() < 0.8
        return life

    def write(self) -> None:
        space = self.chance.randrange(3)
        chosen = sorted(space * SPACE + n for n in self.chance.sample(range(200), 6))
        stored = set(chosen)
        for cleared in self.clears:
            cleared -= stored
        self.gone -= stored
        self.numbers |= stored
        self.writes.append(stored)

        def answered(answers: list[Writing]) -> None:
            self.sure |= {n for n, writing in zip(chosen, answers, strict=True) if writing is Writing.STORED} & stored
            self.writes = [other for other in self.writes if other is not stored]

        self.life.tier.write([self.life.outgoing(n) for n in chosen], answered)

    def read(self) -> None:
        def answered(answers: list[Reading]) -> None:
            self.reading -= 1
            assert set(answers) <= {Reading.GOOD, Reading.ABSENT}

        for n in self.chance.sample(sorted(self.numbers), min(len(self.numbers), 4)):
            self.reading += 1
            self.life.tier.read([self.life.sealing.incoming(self.life.entry(n))], answered)

    def clear(self) -> None:
        space = self.chance.choice((0, 1, 2, 0, 1, 2, None))
        cleared = {n for n in self.numbers if space is None or n // SPACE == space}
        self.sure -= cleared
        for stored in self.writes:
            stored -= cleared
        self.clears.append(cleared)

        def ended(forgotten: Forgotten) -> None:
            assert forgotten.whole
            self.clears = [other for other in self.clears if other is not cleared]
            self.gone |= cleared
            self.ended += 1
            self.look()

        self.life.tier.clear(ended, self.life.tag(space) if space is not None else b"")

    def look(self) -> None:
        assert not {n for n in self.gone if self.life.tier.lookup(self.life.id(n))}

    def again(self) -> None:
        """The next life, perhaps right after the end of a clear, perhaps in the middle of one."""
        how = self.chance.choice(("end", "kill", "scan"))
        if how == "end":
            self.life.end()
        else:
            self.life.kill()
        self.clears, self.writes, self.reading = [], [], 0
        if how == "scan":
            for folder in self.folders:
                no_footers(folder)
        self.life = self._begin()
        self.look()

    def go(self, steps: int, *, evicts: bool) -> None:
        for _ in range(steps):
            self.chance.choices((self.write, self.read, self.clear, self.again), (50, 40, 5, 1))[0]()
            for _ in range(self.chance.randrange(8)):
                self.life.executor.step()
            while len(self.writes) > 6 or self.reading > 24:
                self.life.executor.step()
        self.life.executor.drain()
        good = find(self.life, sorted(self.numbers))
        assert not good & self.gone
        assert evicts or good >= self.sure
        assert not self.life.tier.counts.errors
        assert not any(directory.busy for directory in self.life.tier._directories)
        self.life.end()


@pytest.mark.parametrize("evicts", [True, False])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 8))])
def test_anything_in_any_order(tmp_path: Path, seed: int, evicts: bool) -> None:
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    story = Story(folders, seed, 64 * MIB if evicts else 2048 * MIB)
    story.go(250, evicts=evicts)
    assert story.ended
