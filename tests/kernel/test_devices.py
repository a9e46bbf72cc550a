"""A real well over disks that really fail: right or a miss, in time, and warm again by itself when the disk is well.

The client is stepwell's own, without an engine; blocks are a function of their identity and compared bit for bit. Every
test ends with a well that holds nothing for anybody.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.rig.caller import Caller, Recalled, prefix
from lab.rig.well import RealWell, apart, eventually
from stepwell.client.patience import STALL_S, TOTAL_S, UNANSWERED_S
from stepwell.errors import BackendDown
from stepwell.protocol.messages import MAX_ALLOWED_S
from stepwell.testing.fuse import FaultyDisk, Rule, why_not
from stepwell.testing.mounts import image, why_no_mounts
from stepwell.tiers.disk.site import take
from stepwell.units import Amount

pytestmark = pytest.mark.kernel

NO_FUSE = why_not()
NO_IMAGE = why_no_mounts("ext4")
needs_fuse = pytest.mark.skipif(bool(NO_FUSE), reason=f"no faulty disk here: {NO_FUSE}")
needs_image = pytest.mark.skipif(bool(NO_IMAGE), reason=f"no filesystem in a file here: {NO_IMAGE}")

KIB, MIB = 1 << 10, 1 << 20
SHARD = 32 * KIB
BLOCKS = 64
HUNG_S = STALL_S + MAX_ALLOWED_S + UNANSWERED_S
"""The longest that a request waits of which no block has landed (docs/design/adr/0009)."""

SLACK_S = 1.5
"""So much that no load of the machine matters: the campaign `devices` measures, here nothing may wait for the disk."""

END_S = 12.0
"""A well that is told to end gives writes 5 s, jobs 2 s, and goes."""


@dataclass
class Stand:
    """A well on `disk`, whose files really lie in `below`, and a caller."""

    well: RealWell
    caller: Caller
    below: Path
    disk: FaultyDisk | None = None
    dice: random.Random = field(default_factory=lambda: random.Random(5))

    def spilled(self, count: int = 1, *, written: bool = True) -> list[bytes]:
        """New prefixes that the well has, on disk too."""
        new = [prefix(self.dice, BLOCKS) for _ in range(count)]
        for digests in new:
            eventually(lambda digests=digests: self.caller.spill(digests) == BLOCKS, "there is room")  # type: ignore[misc]
            right(self.caller.recall_all(digests))
        if written:
            eventually(self.well.written, "all is written")
        return new

    def from_disk(self, digests: bytes) -> Recalled:
        self.well.forget_host()
        return right(self.caller.recall(digests))

    def warm_again(self, digests: bytes) -> None:
        """All of it comes from disk, sooner or later, by itself."""
        self.well.forget_host()
        got = right(self.caller.recall_all(digests))
        assert got.blocks == BLOCKS

    def writes_again(self) -> None:
        """What is spilled now reaches the disk, sooner or later, by itself."""

        def written() -> bool:
            (new,) = self.spilled()
            return self.from_disk(new).blocks == BLOCKS

        eventually(written, "writes reach the disk again")

    def lets_go(self) -> None:
        eventually(lambda: not self.well.held(), "nothing is held for anybody")

    def segments(self) -> list[Path]:
        return sorted(self.below.glob("*.seg"))


def right(got: Recalled) -> Recalled:
    """Nothing is wrong, nothing came too late."""
    assert not got.wrong
    assert not got.lost
    assert got.wait_s < TOTAL_S + SLACK_S
    return got


@pytest.fixture
def begin() -> Iterator[Callable[..., Stand]]:
    with ExitStack() as held:
        folder = held.enter_context(apart())

        def make(*, faulty: bool = False, on: Path | None = None, **settings: str) -> Stand:
            below, disk = on or folder / "below", None
            below.mkdir(exist_ok=True)
            if faulty:
                disk = held.enter_context(FaultyDisk(below))
            place = (disk.path if disk else below) / "kv"
            wishes = {"host": "64MiB", "disk": f"{place}:64MiB", "disk_reserve": "1MiB", **settings}
            well = held.enter_context(RealWell(folder / "home", **wishes))
            caller = held.enter_context(Caller(well.home, SHARD))
            if disk is not None:
                held.callback(disk.heal)  # before the well is stopped
            return Stand(well, caller, below / "kv", disk)

        yield make


@pytest.fixture
def faulty(begin: Callable[..., Stand]) -> Stand:
    return begin(faulty=True)


def fault(stand: Stand, *rules: Rule) -> None:
    assert stand.disk is not None
    stand.disk.set(*rules)


@contextmanager
def without_disk(home: Path) -> Iterator[RealWell]:
    """Another well of the same home, as soon as it may start."""
    well = RealWell(home, host="64MiB")

    def starts() -> bool:
        try:
            well.start()
        except BackendDown:
            return False
        return True

    eventually(starts, "another well has the home")
    with well:
        yield well


@needs_fuse
def test_what_cannot_be_read_is_a_miss_and_comes_back(faulty: Stand) -> None:
    there, near = faulty.spilled(2)
    fault(faulty, Rule(op="read", name="*.seg", errno=errno.EIO))
    got = faulty.from_disk(there)
    assert not got.blocks and got.wait_s < HUNG_S + SLACK_S
    assert faulty.well.count("disk_errors_read")
    new = faulty.spilled(1)  # host memory serves
    assert right(faulty.caller.recall(new[0])).blocks == BLOCKS
    fault(faulty)
    for digests in (there, near, *new):
        faulty.warm_again(digests)
    faulty.lets_go()


@needs_fuse
def test_one_bad_spot_costs_its_blocks_and_no_others(faulty: Stand) -> None:
    (there,) = faulty.spilled()
    (segment,) = faulty.segments()
    fault(faulty, Rule(op="read", name=segment.name, first=1 * MIB, last=1 * MIB + 1, errno=errno.EIO))
    got = faulty.from_disk(there)
    assert 0 < got.blocks < BLOCKS
    fault(faulty)
    faulty.caller.spill(there)  # the engine has computed the rest
    faulty.warm_again(there)
    faulty.lets_go()


@needs_fuse
@pytest.mark.parametrize(
    "rule",
    [
        Rule(op="read", name="*.seg", flip=True),
        Rule(op="read", name="*.seg", short=0.3),
        Rule(op="read", name="*.seg", first=4 * KIB, chance=0.3, flip=True),
    ],
)
def test_what_comes_altered_is_a_miss(faulty: Stand, rule: Rule) -> None:
    there = faulty.spilled(4)
    fault(faulty, rule)
    got = [faulty.from_disk(digests) for digests in there]
    assert sum(one.blocks for one in got) < 4 * BLOCKS
    assert faulty.disk is not None and faulty.disk.report().hits[0]
    fault(faulty)
    faulty.writes_again()
    faulty.lets_go()


@needs_fuse
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_no_writes_costs_what_was_not_written(faulty: Stand, number: int) -> None:
    (there,) = faulty.spilled()
    no = ("write", "create", "open", "fallocate", "unlink")
    fault(faulty, *(Rule(op=op, name="*.seg", errno=number) for op in no if op != "open" or number == errno.EROFS))
    (lost,) = faulty.spilled()
    assert right(faulty.caller.recall(lost)).blocks == BLOCKS
    faulty.warm_again(there)  # a busy machine may be late with the first answer
    assert faulty.from_disk(lost).blocks == 0
    fault(faulty)
    faulty.writes_again()
    faulty.warm_again(there)
    faulty.lets_go()


@needs_fuse
@pytest.mark.parametrize(
    "rule",
    [
        Rule(op="write", name="*.seg", first=4 * KIB, lose=True),
        Rule(op="write", name="*.seg", first=4 * KIB, torn=0.4),
        Rule(op="write", name="*.seg", first=4 * KIB, flip=True),
    ],
)
def test_what_was_not_written_as_told_is_a_miss(faulty: Stand, rule: Rule) -> None:
    fault(faulty, rule)
    there = faulty.spilled(4)
    got = [faulty.from_disk(digests) for digests in there]
    assert sum(one.blocks for one in got) < 4 * BLOCKS
    fault(faulty)
    faulty.writes_again()
    faulty.lets_go()


@needs_fuse
def test_a_disk_that_hangs_while_it_is_read(faulty: Stand) -> None:
    there, near = faulty.spilled(2)
    faulty.well.forget_host()
    right(faulty.caller.recall_all(near))  # in host memory again
    fault(faulty, Rule(op="read", hang=True, deaf=True))
    got = right(faulty.caller.recall(there))
    assert not got.blocks and STALL_S <= got.wait_s < HUNG_S + SLACK_S
    for _ in range(20):  # others are served meanwhile, and at once
        got = right(faulty.caller.recall(near))
        assert got.blocks == BLOCKS and got.wait_s < SLACK_S
    eventually(lambda: faulty.caller.recall(there).reason == "tier_down", "it is asked for nothing more")
    assert right(faulty.caller.recall(there)).wait_s < SLACK_S
    assert faulty.well.stats()["disk_reads_up"] == 0
    (new,) = faulty.spilled(written=False)
    assert right(faulty.caller.recall(new)).blocks == BLOCKS
    fault(faulty)
    faulty.warm_again(there)
    faulty.writes_again()
    faulty.lets_go()


@needs_fuse
def test_a_disk_that_hangs_while_it_is_written(faulty: Stand) -> None:
    (there,) = faulty.spilled()
    fault(faulty, Rule(op="write", hang=True, deaf=True))
    new = faulty.spilled(2, written=False)
    time.sleep(1.2)  # until it counts as hanging
    new += faulty.spilled(6, written=False)  # beyond the queue's 8 MiB
    assert all(right(faulty.caller.recall(digests)).blocks == BLOCKS for digests in new)
    assert faulty.well.count("disk_write_queue_bytes") > 0
    fault(faulty)
    eventually(faulty.well.written, "what waited is written")
    assert sum(faulty.from_disk(digests).blocks for digests in (there, *new)) > 2 * BLOCKS
    faulty.writes_again()
    faulty.lets_go()


@needs_fuse
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_well_ends_within_seconds_although_a_thread_hangs(faulty: Stand, op: str) -> None:
    (there,) = faulty.spilled()
    fault(faulty, Rule(op=op, hang=True))
    faulty.from_disk(there)
    faulty.spilled(written=False)
    assert faulty.disk is not None
    eventually(lambda: faulty.disk.report().hanging > 0, "it hangs")  # type: ignore[union-attr]
    began = time.monotonic()
    faulty.well.signal(signal.SIGTERM)
    eventually(lambda: not faulty.well.alive, "the well has ended")
    assert time.monotonic() - began < END_S
    fault(faulty)
    faulty.well.start()
    faulty.caller.join()
    faulty.warm_again(there)
    faulty.lets_go()


@needs_fuse
def test_a_device_that_ignores_signals_holds_the_process_and_nothing_else(faulty: Stand) -> None:
    """The kernel keeps a process whose thread waits for a block device, whatever signal it gets, and with it the lock
    of that directory. Engines know at once that the well is gone, and another may have its home within seconds."""
    (there,) = faulty.spilled()
    fault(faulty, Rule(op="read", hang=True, deaf=True))
    faulty.from_disk(there)
    began = time.monotonic()
    faulty.well.signal(signal.SIGTERM)
    eventually(lambda: not faulty.caller.scheduler.live, "its engines know")
    assert time.monotonic() - began < 2 + SLACK_S
    assert right(faulty.caller.recall(there)).blocks == 0
    with without_disk(faulty.well.home) as other:
        assert time.monotonic() - began < END_S
        assert faulty.well.alive
        faulty.caller.join()
        (new,) = faulty.spilled(written=False)
        assert right(faulty.caller.recall(new)).blocks == BLOCKS
        with pytest.raises(BackendDown, match="another well holds its lock"):
            take(faulty.disk.path / "kv", Amount(size=64 * MIB), Amount(size=MIB))  # type: ignore[union-attr]
        other.stop()
    fault(faulty)
    eventually(lambda: not faulty.well.alive, "the process has ended")


@needs_image
def test_a_tiny_filesystem_is_full_and_has_room_again(begin: Callable[..., Stand]) -> None:
    with image("ext4", 100) as tiny:
        stand = begin(on=tiny.path, disk_reserve="4KiB")
        (there,) = stand.spilled()
        ballast = tiny.path / "ballast"
        fd = os.open(ballast, os.O_CREAT | os.O_WRONLY)
        status = os.statvfs(tiny.path)
        os.posix_fallocate(fd, 0, status.f_bavail * status.f_frsize - 256 * KIB)
        os.close(fd)
        late = stand.spilled(9)  # beyond the segment that is there
        assert right(stand.caller.recall(late[-1])).blocks == BLOCKS
        kept = sum(stand.from_disk(digests).blocks for digests in (there, *late))
        assert 0 < kept <= 16 * MIB // SHARD  # one segment, which its newest blocks have
        ballast.unlink()
        stand.writes_again()
        stand.lets_go()
        stand.well.stop()


@needs_image
def test_a_filesystem_that_turns_read_only_is_read_on(begin: Callable[..., Stand]) -> None:
    """As ext4 does after an error: what is open stays so, reads go on, writes end with EROFS."""
    with image("ext4", 100) as disk:
        stand = begin(on=disk.path)
        there = stand.spilled(2)
        os.sync()
        disk.turn_read_only()
        with pytest.raises(OSError):
            (disk.path / "file").touch()
        new = stand.spilled(10)
        assert right(stand.caller.recall(new[-1])).blocks == BLOCKS
        assert all(stand.from_disk(digests).blocks == BLOCKS for digests in there)
        assert sum(stand.from_disk(digests).blocks for digests in new) == 0
        stand.lets_go()
        stand.well.stop()
        disk.unmount()
        disk.mount()
        stand.well.start()
        stand.caller.join()
        for digests in there:
            stand.warm_again(digests)
        stand.writes_again()
        stand.lets_go()
        stand.well.stop()


def cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def empty(path: Path, dice: random.Random) -> None:
    os.truncate(path, 0)


def overwrite(path: Path, dice: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(dice.randrange(1, 200) * 4 * KIB)
        file.write(dice.randbytes(MIB))


def replace(path: Path, dice: random.Random) -> None:
    new = path.with_name("new")
    new.write_bytes(dice.randbytes(path.stat().st_size))
    new.rename(path)


def remove(path: Path, dice: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [cut, empty, overwrite, replace, remove])
def test_segments_that_change_under_a_running_well(begin: Callable[..., Stand], harm: Callable[..., None]) -> None:
    stand = begin()
    there = stand.spilled(20)  # three segments
    dice = random.Random(harm.__name__)
    for segment in stand.segments():
        harm(segment, dice)
    for digests in there:
        stand.from_disk(digests)
    stand.writes_again()
    stand.lets_go()
    stand.well.stop()
    stand.well.start()
    stand.caller.join()
    for digests in there:
        right(stand.caller.recall(digests))
    if harm is replace:  # files that are none of ours take our room, and are not ours to delete
        strange = stand.segments()
        assert stand.well.count("disk_foreign_files") == len(strange)
        for segment in strange:
            segment.unlink()
        stand.well.stop()
        stand.well.start()
        stand.caller.join()
    stand.writes_again()
    stand.lets_go()


def test_segments_that_change_places_under_a_running_well(begin: Callable[..., Stand]) -> None:
    stand = begin()
    there = stand.spilled(20)
    one, two, *_ = stand.segments()
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    got = [stand.from_disk(digests) for digests in there]
    assert sum(each.blocks for each in got) < 20 * BLOCKS
    stand.writes_again()
    stand.lets_go()


def test_the_whole_directory_goes_under_a_running_well(begin: Callable[..., Stand]) -> None:
    stand = begin()
    there = stand.spilled(4)
    shutil.rmtree(stand.below)
    for digests in there:
        stand.from_disk(digests)
    new = stand.spilled(12)
    assert right(stand.caller.recall(new[-1])).blocks == BLOCKS
    stand.lets_go()
    stand.well.stop()
    stand.well.start()
    stand.caller.join()
    stand.writes_again()
    stand.lets_go()
