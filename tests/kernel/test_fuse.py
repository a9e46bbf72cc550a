"""The faulty disk itself: every fault that it promises arrives at who asks the kernel, and nothing of it is left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.rig.well import eventually
from stepwell.io.files import SystemFiles
from stepwell.io.mounts import mounts
from stepwell.io.staging import make
from stepwell.testing.fuse import FaultyDisk, Rule, why_not

WHY = why_not()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no faulty disk here: {WHY}")

PATIENCE_S = 20.0
KIB = 1 << 10


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    backing = tmp_path / "backing"
    backing.mkdir()
    with FaultyDisk(backing, seed=7) as disk:
        yield disk


@pytest.fixture
def file(disk: FaultyDisk, tmp_path: Path) -> Iterator[int]:
    """An open file of 64 KiB, and its bytes below in `backing/data.seg`."""
    (tmp_path / "backing/data.seg").write_bytes(bytes(range(256)) * 256)
    fd = os.open(disk.path / "data.seg", os.O_RDWR)
    yield fd
    with contextlib.suppress(OSError):  # of a disk that is gone it tells, and closes
        os.close(fd)


def refused(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == number


def test_without_rules_it_is_the_directory_below(disk: FaultyDisk, tmp_path: Path) -> None:
    backing, data = tmp_path / "backing", os.urandom(3 << 20)
    (disk.path / "folder").mkdir()
    (disk.path / "folder/a").write_bytes(data)
    assert (backing / "folder/a").read_bytes() == data == (disk.path / "folder/a").read_bytes()
    (disk.path / "folder/a").rename(disk.path / "b")
    os.link(disk.path / "b", disk.path / "c")
    assert sorted(os.listdir(disk.path)) == ["b", "c", "folder"] == sorted(os.listdir(backing))
    os.truncate(disk.path / "b", 5)
    os.chmod(disk.path / "b", 0o640)
    status, below = (disk.path / "c").stat(), (backing / "c").stat()
    assert (status.st_size, status.st_mode, status.st_nlink) == (5, below.st_mode, 2)
    (disk.path / "b").unlink()
    (disk.path / "c").unlink()
    (disk.path / "folder").rmdir()
    assert not list(backing.iterdir())
    assert os.statvfs(disk.path).f_blocks == os.statvfs(backing).f_blocks


def test_changes_below_are_seen_at_once(disk: FaultyDisk, file: int, tmp_path: Path) -> None:
    below = tmp_path / "backing/data.seg"
    assert os.pread(file, 4, 0) == bytes(range(4))
    below.write_bytes(b"new")
    assert os.pread(file, 10, 0) == b"new"
    assert os.fstat(file).st_size == 3
    below.unlink()
    assert os.pread(file, 10, 0) == b"new"  # it is open still
    assert not (disk.path / "data.seg").exists()


def test_the_disk_tier_s_own_files_work_there(disk: FaultyDisk) -> None:
    files = SystemFiles(disk.path)
    try:
        assert files.lock("lock")
        with open(disk.path / "lock", "rb") as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with files.create("a.seg", 1 << 20) as made:
            assert made.blank()
            page = make(4096)[:4096]
            page[:] = 7
            made.write(page, 8192)
            made.sync()
            assert not made.blank()
        with files.open("a.seg") as found:
            into = make(1 << 20)[: 1 << 20]
            assert found.read(into, 0) == 1 << 20
            assert into[8192:12288].tobytes() == bytes([7]) * 4096 and not into[:8192].any()
            found.zero(8192, 4096)
            found.read(into, 0)
            assert not into.any()
        assert sorted(files.names()) == ["a.seg", "lock"]
        files.unlink("a.seg")
        files.sync()
        assert files.free()[1]
    finally:
        files.close()


CALLS: dict[str, Callable[[Path, int], object]] = {
    "read": lambda path, fd: os.pread(fd, 10, 0),
    "write": lambda path, fd: os.pwrite(fd, b"x", 0),
    "open": lambda path, fd: os.open(path / "data.seg", os.O_RDONLY),
    "create": lambda path, fd: os.open(path / "new.seg", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    "lookup": lambda path, fd: os.stat(path / "data.seg"),
    "getattr": lambda path, fd: os.fstat(fd),
    "setattr": lambda path, fd: os.ftruncate(fd, 9),
    "unlink": lambda path, fd: os.unlink(path / "data.seg"),
    "rename": lambda path, fd: os.rename(path / "data.seg", path / "other"),
    "mkdir": lambda path, fd: os.mkdir(path / "folder"),
    "fsync": lambda path, fd: os.fsync(fd),
    "fallocate": lambda path, fd: os.posix_fallocate(fd, 0, 4096),
    "readdir": lambda path, fd: os.listdir(path),
    "statfs": lambda path, fd: os.statvfs(path),
}


@pytest.mark.parametrize("op", CALLS)
def test_every_operation_can_be_refused(disk: FaultyDisk, file: int, op: str) -> None:
    disk.set(Rule(op=op, errno=errno.EUCLEAN))
    refused(errno.EUCLEAN, lambda: CALLS[op](disk.path, file))
    assert disk.report().hits[0] >= 1
    disk.heal()
    found = CALLS[op](disk.path, file)
    if op in ("open", "create"):
        os.close(int(str(found)))


def test_a_rule_meets_what_it_names_and_nothing_else(disk: FaultyDisk, file: int) -> None:
    (disk.path / "other").write_bytes(bytes(64 * KIB))
    disk.set(
        Rule(op="read", name="*.seg", first=8 * KIB, last=12 * KIB, errno=errno.EIO),
        Rule(op="read", name="other", skip=1, times=2, errno=errno.ENXIO),
    )
    assert len(os.pread(file, 8 * KIB, 0)) == len(os.pread(file, 4 * KIB, 12 * KIB)) + 4 * KIB
    refused(errno.EIO, lambda: os.pread(file, 8 * KIB, 1 * KIB))
    other = os.open(disk.path / "other", os.O_RDONLY)
    assert os.pread(other, 4 * KIB, 8 * KIB)
    for _ in range(2):
        refused(errno.ENXIO, lambda: os.pread(other, 4 * KIB, 8 * KIB))
    assert os.pread(other, 4 * KIB, 8 * KIB)
    assert disk.report().hits == [1, 2]
    os.close(other)


def test_reads_come_short_or_with_another_bit(disk: FaultyDisk, file: int) -> None:
    right = os.pread(file, 8 * KIB, 0)
    disk.set(Rule(op="read", short=0.5))
    assert os.pread(file, 8 * KIB, 0) == right[: 4 * KIB]
    disk.set(Rule(op="read", flip=True))
    wrong = os.pread(file, 8 * KIB, 0)
    assert sum((a ^ b).bit_count() for a, b in zip(right, wrong, strict=True)) == 1
    disk.heal()
    assert os.pread(file, 8 * KIB, 0) == right


def test_writes_come_short_torn_flipped_or_not_at_all(disk: FaultyDisk, file: int) -> None:
    old, new = os.pread(file, 8 * KIB, 0), bytes(8 * KIB)
    disk.set(Rule(op="write", lose=True))
    assert os.pwrite(file, new, 0) == len(new)
    assert os.pread(file, 8 * KIB, 0) == old
    disk.set(Rule(op="write", torn=0.5))
    assert os.pwrite(file, new, 0) == len(new)
    assert os.pread(file, 8 * KIB, 0) == new[: 4 * KIB] + old[4 * KIB :]
    disk.set(Rule(op="write", short=0.75))
    assert os.pwrite(file, new, 0) == 6 * KIB
    assert os.pread(file, 8 * KIB, 0) == new[: 6 * KIB] + old[6 * KIB :]
    disk.set(Rule(op="write", flip=True))
    assert os.pwrite(file, new, 0) == len(new)
    assert sum(byte.bit_count() for byte in os.pread(file, 8 * KIB, 0)) == 1


def test_chance_is_drawn_for_each_request(disk: FaultyDisk, file: int) -> None:
    disk.set(Rule(op="read", chance=0.5, errno=errno.EIO))
    failed = 0
    for _ in range(100):
        try:
            os.pread(file, 1, 0)
        except OSError:
            failed += 1
    assert 20 < failed < 80
    assert disk.report().hits == [failed]


def test_a_delay_delays(disk: FaultyDisk, file: int) -> None:
    disk.set(Rule(op="read", delay=0.2))
    began = time.monotonic()
    assert os.pread(file, 4, 0) == bytes(range(4))
    assert time.monotonic() - began >= 0.2


def test_what_hangs_holds_up_nobody_else_and_goes_on_when_healed(disk: FaultyDisk, file: int) -> None:
    disk.set(Rule(op="read", first=4 * KIB, hang=True))
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(os.pread(file, 4, 8 * KIB))) for _ in range(20)]
    for thread in threads:
        thread.start()
    eventually(lambda: disk.report().hanging == 20, "they hang")
    assert os.pread(file, 4, 0) == bytes(range(4))
    assert os.pwrite(file, b"abcd", 8 * KIB) == 4
    assert not got
    disk.heal()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert got == [b"abcd"] * 20
    assert disk.report().hanging == 0


def hanging(disk: FaultyDisk, file: int) -> tuple[threading.Thread, list[int | None]]:
    """A read that hangs by now, and the number of the error that it will end in."""
    numbers: list[int | None] = []

    def read() -> None:
        try:
            os.pread(file, 4, 0)
        except OSError as error:
            numbers.append(error.errno)

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: disk.report().hanging == 1, "it hangs")
    return thread, numbers


def test_a_hang_may_end_in_an_error(disk: FaultyDisk, file: int) -> None:
    disk.set(Rule(op="read", hang=True, errno=errno.EIO))
    thread, numbers = hanging(disk, file)
    disk.heal()
    thread.join(PATIENCE_S)
    assert numbers == [errno.EIO]


@pytest.mark.parametrize("deaf", [False, True])
def test_who_hangs_can_be_killed_unless_the_device_is_deaf(disk: FaultyDisk, file: int, deaf: bool) -> None:
    disk.set(Rule(op="read", hang=True, deaf=deaf))
    reader = subprocess.Popen([sys.executable, "-c", f"open({str(disk.path / 'data.seg')!r}, 'rb').read()"])
    eventually(lambda: disk.report().hanging == 1, "it hangs")
    reader.send_signal(signal.SIGKILL)
    if deaf:
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.5)
        disk.heal()
    assert reader.wait(PATIENCE_S) == -signal.SIGKILL
    eventually(lambda: disk.report().hanging == 0, "nothing hangs")


def test_nothing_is_left_whatever_hangs(tmp_path: Path) -> None:
    (tmp_path / "data.seg").write_bytes(bytes(64 * KIB))
    with FaultyDisk(tmp_path) as disk:
        fd = os.open(disk.path / "data.seg", os.O_RDONLY)
        disk.set(Rule(op="read", hang=True, deaf=True))
        ended = threading.Event()

        def read() -> None:
            with contextlib.suppress(ConnectionAbortedError):  # answered, or cut off with the mount
                os.pread(fd, 4, 0)
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        eventually(lambda: disk.report().hanging == 1, "it hangs")
    assert ended.wait(PATIENCE_S)
    assert str(disk.path) not in {mount.point for mount in mounts()}
    assert not disk.path.exists()
    assert not Path(f"/proc/{disk.pid}").exists()
    refused(errno.ENOTCONN, lambda: os.pread(fd, 4, 0))
    with contextlib.suppress(OSError):  # it tells, and closes
        os.close(fd)


def test_nothing_is_left_when_its_maker_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from stepwell.testing.fuse import FaultyDisk\n"
        f"with FaultyDisk(Path({str(tmp_path)!r})) as disk: print(disk.pid, disk.path, flush=True); time.sleep(99)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pid, path = maker.stdout.readline().split()
    assert path in {mount.point for mount in mounts()}
    maker.kill()
    maker.wait(PATIENCE_S)
    maker.stdout.close()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "its process ends")
    assert path not in {mount.point for mount in mounts()}
    Path(path).rmdir()


def test_when_its_process_dies_all_fails_and_nothing_hangs(disk: FaultyDisk, file: int) -> None:
    disk.set(Rule(op="read", hang=True, deaf=True))
    thread, numbers = hanging(disk, file)
    os.kill(disk.pid, signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert numbers == [errno.ECONNABORTED]
    refused(errno.ENOTCONN, lambda: os.pread(file, 4, 0))
