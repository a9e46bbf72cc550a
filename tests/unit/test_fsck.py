"""`stepwell cache fsck` on real directories: what it counts, and that it changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from disks import BLOCK, MIB, PER_SEGMENT, SEGMENT, Life, poke, segments
from typer.testing import CliRunner

import golden
from stepwell.block.frame import FrameHeader
from stepwell.block.layout import PAGE
from stepwell.cli.commands import app
from stepwell.codecs.seal import seal
from stepwell.errors import StepwellError
from stepwell.io.files import SystemFiles
from stepwell.ops import fsck as module
from stepwell.ops.fsck import FsckReport, examine, text
from stepwell.vault import keyring as vault
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

COUNT = 100


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the keys of the blocks."""
    path = tmp_path / "home"
    path.mkdir()
    raw = vault._render([vault._TenantRecord("default", [vault._EpochRecord(1, golden.EPOCH.key)])])
    (path / "keyring").touch(0o600)
    (path / "keyring").write_bytes(raw)
    assert Keyring.read(path / "keyring") == golden.KEYRING
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Two closed segments with COUNT blocks."""
    path = tmp_path / "disk"
    path.mkdir()
    life = Life(path)
    life.put_all(range(COUNT))
    life.end()
    return path


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size, zlib.crc32(path.read_bytes()))
        for path in folder.iterdir()
        if path.is_file()
    }


def examined(disk: Path, home: Path) -> FsckReport:
    before = state(disk)
    report = examine(disk, home / "keyring")
    assert state(disk) == before, "it changes nothing"
    return report


def test_what_is_whole_is_good(disk: Path, home: Path) -> None:
    (disk / "notes.txt").write_text("mine")
    with (disk / f"{'0' * 16}.seg").open("wb") as file:
        file.truncate(SEGMENT)
    report = examined(disk, home)
    assert report.ok
    assert report.blocks == {"good": COUNT}
    assert report.segments == {"closed": 2, "empty": 1}
    assert (report.nbytes, report.block_bytes) == (3 * SEGMENT, COUNT * BLOCK)
    assert report.foreign_files == 1
    assert "nothing is damaged" in text(report, home)


def test_every_kind_of_damage_is_found(disk: Path, home: Path) -> None:
    first, second = segments(disk)
    frame = BLOCK // 2
    for block, at in ((3, 5000), (4, 10), (5, frame + 20), (6, frame + 6000)):
        poke(first, PAGE + block * BLOCK + at, b"\xff\x00\xff\x01")
    with first.open("rb") as file:
        file.seek(PAGE + 8 * BLOCK)
        swapped = file.read(frame), file.read(frame)
    poke(first, PAGE + 8 * BLOCK, swapped[1] + swapped[0])
    report = examined(disk, home)
    assert not report.ok
    assert report.blocks == {"good": COUNT - 5, "damaged": 5}
    poke(second, 20, b"xx")
    report = examined(disk, home)
    assert report.segments == {"closed": 1, "damaged": 1}
    assert "misses" in text(report, home)


def test_blocks_of_other_keys_are_no_damage(disk: Path, home: Path, tmp_path: Path) -> None:
    other = Keyring((TenantKeys("default", (Epoch(1, b"another key of thirty-two bytes!"),)),))
    life = Life(disk, keyring=other)
    life.put_all(range(10))
    life.end()
    report = examined(disk, home)
    assert report.ok
    assert report.blocks == {"good": COUNT, "no_key": 10}
    nowhere = tmp_path / "nowhere"
    report = examined(disk, nowhere)
    assert report.ok
    assert report.blocks == {"no_key": COUNT + 10}
    assert not nowhere.exists(), "no keyring is made"
    assert "there is no keyring" in text(report, nowhere)


def test_plain_blocks_need_no_key(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    life = Life(disk, sealed=False)
    life.put_all(range(10))
    life.end()
    assert examined(disk, tmp_path / "none").blocks == {"good": 10}
    poke(segments(disk)[0], PAGE + 5000, b"\xff\x00\xff")
    assert examined(disk, tmp_path / "none").blocks == {"good": 9, "damaged": 1}


def test_what_has_expired_is_counted(tmp_path: Path, home: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    path = disk / golden.SEGMENT_NAME
    path.write_bytes(golden.segment(closed=True))
    header = dataclasses.replace(golden.header(1, 0, sealed=True), expires=golden.CREATED - 10**9)
    frame = golden.frame(1, 0, sealed=True)
    seal(header, golden.key(), golden.payload(1, 0), frame)
    poke(path, PAGE + 2 * len(frame), frame.tobytes())
    assert examined(disk, home).blocks == {"good": 2, "expired": 1}


def test_another_version_and_what_cannot_be_read(disk: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = segments(disk)
    page = bytearray(first.read_bytes()[:PAGE])
    page[8:10] = (3).to_bytes(2, "little")
    poke(first, 0, bytes(page[:-4]) + zlib.crc32(page[:-4]).to_bytes(4, "little"))
    assert examined(disk, home).segments == {"other_version": 1, "closed": 1}
    assert examined(disk, home).ok

    def look(files: object, name: str, staging: object) -> object:
        raise PermissionError(name)

    monkeypatch.setattr(module, "look", look)
    report = examined(disk, home)
    assert report.segments == {"unreadable": 2}
    assert not report.ok


def test_what_only_has_a_segments_name_is_foreign(disk: Path, home: Path) -> None:
    """As it is to the well."""
    (disk / f"{'1' * 16}.seg").symlink_to(segments(disk)[0])
    (disk / f"{'2' * 16}.seg").mkdir()
    os.mkfifo(disk / f"{'3' * 16}.seg")
    report = examined(disk, home)
    assert report.ok and report.foreign_files == 3
    assert report.segments == {"closed": 2}


def test_where_there_is_no_disk_tier_it_says_so(tmp_path: Path, home: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StepwellError) as caught:
        examine(tmp_path, home / "keyring")
    assert caught.value.code == "SW-608" and "there is no disk tier in" in caught.value.what
    (tmp_path / "lock").touch()
    report = examine(tmp_path, home / "keyring")
    assert report.ok
    assert text(report, home).splitlines()[:2] == [f"{tmp_path}: 0 segments, 0B", "0 blocks"]


def test_a_well_that_runs_is_seen_and_not_disturbed(tmp_path: Path, home: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    life = Life(disk)
    assert life.files[0].lock("lock")
    life.put_all(range(20))
    report = examined(disk, home)
    assert report.in_use
    assert report.segments == {"open": 1}
    assert report.blocks == {"good": 20}
    assert "a well is using it" in text(report, home)
    life.put_all(range(20, 30))
    life.end()
    assert not examined(disk, home).in_use


def test_asking_for_the_lock_never_takes_it_from_a_well(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            module._in_use(tmp_path)
            time.sleep(0.001)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(50):
            files = SystemFiles(tmp_path)
            assert files.lock("lock")
            files.close()
    finally:
        over.set()
        asking.join()


def test_what_a_well_does_meanwhile_is_no_damage(disk: Path, home: Path) -> None:
    """Segments are evicted and written anew under our eyes, from the first look to the last."""
    life = Life(disk)
    assert life.files[0].lock("lock")
    life.put_all(range(1000, 1000 + 2 * PER_SEGMENT))
    over = threading.Event()

    def write() -> None:
        for n in itertools.cycle(range(2000, 9000, 8)):
            if over.wait(0.02):
                return
            life.put(*range(n, n + 8))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            report = examine(disk, home / "keyring")
            assert report.ok, report
            assert report.blocks["good"] + report.moved
    finally:
        over.set()
        writer.join()
    life.end()


def test_a_write_under_way_is_waited_for(tmp_path: Path, home: Path) -> None:
    """Its header may be there before its payload."""
    disk = tmp_path / "disk"
    disk.mkdir()
    life = Life(disk)
    assert life.files[0].lock("lock")
    life.put(1)
    (path,) = segments(disk)
    whole = path.read_bytes()
    poke(path, PAGE + 5000, bytes(1000))
    later = threading.Timer(0.15, poke, (path, 0, whole))
    later.start()
    report = examine(disk, home / "keyring")
    later.join()
    assert report.blocks == {"good": 1}
    poke(path, PAGE + 5000, bytes(1000))
    assert examined(disk, home).blocks == {"damaged": 1}
    life.end()


def test_memory_is_bounded_by_the_largest_frame(disk: Path, home: Path) -> None:
    """A footer may claim what it likes, and so may a header."""
    path = disk / f"{'2' * 16}.seg"
    content = bytearray(golden.segment(closed=True))
    huge = dataclasses.replace(golden.header(0, 0, sealed=True), payload=1 << 30, raw=1 << 30)
    content[PAGE : 2 * PAGE] = huge.pack()
    assert FrameHeader.parse(huge.pack()) is not None
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = examined(disk, home)
    assert report.blocks == {"good": COUNT + 2, "damaged": 1}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10, "KiB"


def test_people_are_told_how_far_it_is(disk: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    examine(disk, home / "keyring", said.append)
    assert said == [], "not when it is quick"
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    examine(disk, home / "keyring", said.append)
    assert "segment 1 of 2" in said[0]
    assert "segment 2 of 2" in said[-1]


def test_what_is_no_directory_is_refused_in_words(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", Path(__file__)):
        with pytest.raises(StepwellError) as caught:
            examine(path, tmp_path / "keyring")
        assert caught.value.code == "SW-608"


def test_a_corrupt_keyring_is_said(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "keyring").touch(0o600)
    (tmp_path / "keyring").write_text("x")
    with pytest.raises(StepwellError) as caught:
        examine(disk, tmp_path / "keyring")
    assert caught.value.code == "SW-303"


def test_the_command(disk: Path, home: Path) -> None:
    done = CliRunner().invoke(app, ["cache", "fsck", str(disk), "--home", str(home), "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.output)
    assert values["ok"] and values["blocks"] == {"good": COUNT, "expired": 0, "no_key": 0, "unknown": 0, "damaged": 0}
    poke(segments(disk)[0], PAGE + 5000, b"\xff\x00\xff")
    done = CliRunner().invoke(app, ["cache", "fsck", str(disk), "--home", str(home)])
    assert done.exit_code == 1
    assert "1 damaged" in done.output
    missing = subprocess.run(
        [sys.executable, "-m", "stepwell", "cache", "fsck", str(disk / "no")],
        env=os.environ | {"STEPWELL_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 1
    assert "SW-608" in missing.stderr


def test_a_large_limit_of_blocks_is_read_in_one_pass(tmp_path: Path, home: Path) -> None:
    """Each byte of a block is read once: it is no slower than the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    life = Life(disk, limit=64 * MIB)
    life.put_all(range(60))
    life.end()
    before = int(np.uint64(_read_bytes()))
    examined_blocks = examine(disk, home / "keyring").block_bytes
    assert examined_blocks == 60 * BLOCK
    assert _read_bytes() - before < 1.2 * 60 * BLOCK + MIB


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
