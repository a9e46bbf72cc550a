"""SIGKILL at any moment of a write, and disks that are really full: in processes of their own."""

from __future__ import annotations

import os
import random
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from disks import MIB, Life, segments

from stepwell.errors import StepwellError
from stepwell.io.clock import MonotonicClock
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.tiers.base import Reading, Writing
from stepwell.tiers.disk.site import take
from stepwell.units import parse_amount

ROUNDS = 15
MOST = 96  # blocks written by one life
ENDED = 0xFFFFFFFF


def write_until_killed(folder: Path, first: int) -> NoReturn:
    """Writes blocks on threads, several calls at a time, and says which ones are stored: as numbers on its output,
    after its own."""
    try:
        tell(os.getpid())
        life = Life(folder, limit=512 * MIB)
        wakeup = Wakeup()
        executor = ThreadExecutor(wakeup, 4)
        life.tier._executor = executor
        for directory in life.tier._directories:
            directory.shared.executor = executor
        clock = MonotonicClock()
        calls: list[tuple[range, list[list[Writing]]]] = []
        numbers = first
        while True:
            while len(calls) < 3 and numbers < first + MOST:
                calls.append((range(numbers, numbers + 4), life.write(*range(numbers, numbers + 4))))
                numbers += 4
            executor.complete(clock, clock.now() + 0.001)
            for call in [call for call in calls if call[1]]:
                calls.remove(call)
                for n, writing in zip(call[0], call[1][0], strict=True):
                    if writing is Writing.STORED:
                        tell(n)
            if not calls:
                signal.pause()
    finally:
        os._exit(1)


def tell(number: int) -> None:
    os.write(1, struct.pack("<I", number))


def writers(folder: Path) -> None:
    """For each number that comes in, a writer of blocks from this one on; when it is dead, ENDED goes out. Forked from
    a process that has no tier yet: its buffers are not for children."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            write_until_killed(folder, int(line))
        os.waitpid(child, 0)
        tell(ENDED)


def run(call: str, *around: str) -> subprocess.Popen[bytes]:
    """Calls a function of this module in a process of its own; `around`: a command to which it is the argument."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent / "src")])
    code = f"import test_disk_kills as t; from pathlib import Path; t.{call}"
    program = [sys.executable, "-c", code]
    command = [*around, shlex.join(program)] if around else program
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE if around else None
    )


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
def test_whatever_moment_a_writer_is_killed_at(tmp_path: Path, part: int) -> None:
    """What it said is stored is there in the next life, and what is there is what was written."""
    chance = random.Random(part)
    told: set[int] = set()
    with run(f"writers(Path({str(tmp_path)!r}))") as zygote:
        assert zygote.stdin is not None and zygote.stdout is not None

        def hear() -> int:
            assert zygote.stdout is not None
            (number,) = struct.unpack("<I", zygote.stdout.read(4))
            return int(number)

        for first in range(0, 1000 * ROUNDS // 3, 1000):
            zygote.stdin.write(b"%d\n" % first)
            zygote.stdin.flush()
            pid = hear()
            if first % 3000 == 0:  # however busy the machine is, some come to write
                told.add(hear())
            time.sleep(chance.random() * 0.15)
            os.kill(pid, signal.SIGKILL)
            while (number := hear()) != ENDED:
                told.add(number)
            life = Life(tmp_path, limit=512 * MIB)
            written = [n for start in range(0, first + 1, 1000) for n in range(start, start + MOST)]
            good = {n for n in written if life.get(n) is Reading.GOOD}
            assert good >= told
            assert life.tier.capacity().used == sum(path.stat().st_size for path in segments(tmp_path))
            if chance.random() < 0.5:
                life.end()
            else:
                life.kill()
        zygote.stdin.close()


def in_a_mount_namespace(folder: Path, prepare: str, call: str) -> None:
    """Runs `call` of this module in a process that sees a mount of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    with run(f"{call}(Path({str(folder)!r}))", "unshare", "-m", "sh", "-c", f'{prepare} && exec sh -c "$0"') as process:
        _, said = process.communicate()
    if process.returncode == 32:
        pytest.skip(f"no such mount here: {said.decode()}")
    assert process.returncode == 0, said.decode()


def fill_and_make_room(folder: Path) -> None:
    life = Life(folder)
    for first in range(0, 200, 8):
        life.put(*range(first, first + 8))
    assert len(segments(folder)) == 2, "a third one has no room"
    assert life.put(300) == [Writing.STORED], "it goes on with what it has"
    assert life.get(300) is Reading.GOOD
    life.clear()
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        while True:
            try:
                file.write(bytes(MIB))
                file.flush()
            except OSError:
                break
    assert life.put(400) == [Writing.FULL]
    assert {kind for kind, _ in life.troubles} == {"no_space"}
    ballast.unlink()
    assert life.put(401) == [Writing.FULL], "not at once"
    life.clock.advance(10)
    assert life.put(*range(402, 410)) == [Writing.STORED] * 8
    assert life.good(range(402, 410)) == set(range(402, 410))
    life.end()
    again = Life(folder)
    assert again.good(range(402, 410)) == set(range(402, 410))
    again.end()


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_disk_that_is_really_full(tmp_path: Path, kind: str) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    if kind == "ext4":
        make = f"truncate -s 44M {image} && mkfs.ext4 -q -m 0 -O ^has_journal {image}"
        prepare = f"({make}) >/dev/null && mount -o loop {image} {disk}"
    else:
        prepare = f"mount -t tmpfs -o size=40m tmpfs {disk}"
    in_a_mount_namespace(disk, f"{{ {prepare} || exit 32; }}", "fill_and_make_room")


def refuse_what_cannot_be_written(folder: Path) -> None:
    for path in (folder, folder / "new"):
        try:
            take(path, parse_amount("64MiB"), parse_amount("1MiB"))
        except StepwellError as error:
            assert error.code == "SW-608", error
            assert "ead-only" in error.why, error
        else:
            raise AssertionError


def test_a_directory_that_is_mounted_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    prepare = f"{{ mount --bind {disk} {disk} && mount -o remount,ro,bind {disk} || exit 32; }}"
    in_a_mount_namespace(disk, prepare, "refuse_what_cannot_be_written")


def keep_reading_what_is_read_only(folder: Path) -> None:
    life = Life(folder)
    life.put_all(range(20))
    life.end()
    life = Life(folder)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    assert life.good(range(20)) == set(range(20))
    assert set(life.put(100, 101)) <= {Writing.FULL, Writing.FAILED}
    assert life.good(range(20)) == set(range(20))
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    life.clock.advance(10)
    assert life.put(100, 101) == [Writing.STORED] * 2
    life.end()


def test_a_filesystem_that_turns_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    prepare = f"{{ mount -t tmpfs -o size=80m tmpfs {disk} || exit 32; }}"
    in_a_mount_namespace(disk, prepare, "keep_reading_what_is_read_only")
