"""The weights fingerprint: what changes it, what the cache may answer, and the child process that computes it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from stepwell.block.facts import digest_of, lp
from stepwell.client import fingerprint as module
from stepwell.client.fingerprint import (
    CACHE_NAME,
    MAX_ENTRIES,
    Failed,
    Fingerprint,
    Known,
    PendingFingerprint,
    fingerprint,
)
from stepwell.errors import IdentityMismatch


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return home / CACHE_NAME


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose contents were read, in order."""
    names: list[str] = []
    real = module._read

    def counted(path: Path) -> tuple[int, bytes]:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(module, "_read", counted)
    return names


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ctime counts as old enough to be cached, and as proof: tests need not wait, wherever they run."""
    monkeypatch.setattr(module, "_RACY_NS", -(10**18))
    monkeypatch.setattr(module, "unstamped", lambda path, table: "")


def make(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return [folder / f"{name}.safetensors" for name in contents]


def until_settled(child: Fingerprint) -> Known | Failed:
    while isinstance(result := child.result(), PendingFingerprint):  # bounded by the test's time limit
        time.sleep(0.01)
    return result


# --- facts -----------------------------------------------------------------------------------


def test_facts_differ_wherever_their_text_moves_between_fields() -> None:
    sets = [{}, {"": ""}, {"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {"a": "\ud800"}]
    assert len({digest_of(facts) for facts in sets}) == len(sets)
    assert all(len(digest_of(facts)) == 32 for facts in sets)
    assert digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"})
    assert digest_of({"a": "bc"}) == blake3(b"\0\0\0\1a\0\0\0\2bc").digest()


# --- what it is ------------------------------------------------------------------------------


def test_is_the_documented_hash(tmp_path: Path) -> None:
    files = make(tmp_path / "m", b=b"two", a=b"one")
    expected = blake3(lp(b"stepwell weights 1"))
    for name, content in ((b"a.safetensors", b"one"), (b"b.safetensors", b"two")):
        expected.update(lp(name) + lp((3).to_bytes(8, "big")) + lp(blake3(content).digest()))
    assert fingerprint(files, None) == expected.digest()


def test_same_files_elsewhere_and_in_another_order_are_the_same_model(tmp_path: Path) -> None:
    here = make(tmp_path / "here", a=b"x" * 5000, b=b"y")
    there = make(tmp_path / "there" / "deep", b=b"y", a=b"x" * 5000)
    assert fingerprint(here, None) == fingerprint([*there, there[0]], None)


def test_content_name_and_set_of_files_all_count(tmp_path: Path) -> None:
    big = bytes(9 << 20)  # more than two reads
    variants = [
        make(tmp_path / "1", a=big, b=b"y"),
        make(tmp_path / "2", a=big[:-1] + b"\1", b=b"y"),
        make(tmp_path / "3", a=big, c=b"y"),
        make(tmp_path / "4", a=big),
        make(tmp_path / "5", a=big, b=b"y", c=b""),
        make(tmp_path / "6", a=b"y", b=big),
    ]
    assert len({fingerprint(files, None) for files in variants}) == len(variants)


def test_nothing_to_read_or_unreadable_is_an_error(tmp_path: Path) -> None:
    for files in ([], [tmp_path / "absent.safetensors"], [tmp_path]):
        with pytest.raises(IdentityMismatch) as caught:
            fingerprint(files, None)
        assert caught.value.code == "SW-403"


# --- the cache -------------------------------------------------------------------------------


@pytest.mark.usefixtures("settled")
def test_a_cached_hash_is_not_read_again(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    files = make(tmp_path / "m", a=b"one", b=b"two")
    first = fingerprint(files, cache)
    assert reads == ["a.safetensors", "b.safetensors"]
    assert fingerprint(files, cache) == first
    assert len(reads) == 2
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert os.listdir(cache.parent) == [CACHE_NAME]


@pytest.mark.usefixtures("settled")
def test_changed_weights_of_same_name_size_and_mtime_are_seen(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    files = make(tmp_path / "m", a=b"one", b=b"two")
    first = fingerprint(files, cache)
    before = files[0].stat()
    time.sleep(0.02)  # beyond the kernel's clock tick, which the 2 s rule covers in real use
    with open(files[0], "r+b") as file:
        file.write(b"ONE")
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    after = files[0].stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert fingerprint(files, cache) != first
    assert reads[2:] == ["a.safetensors"]


def test_a_file_changed_just_now_is_not_cached(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    files = make(tmp_path / "m", a=b"one")
    fingerprint(files, cache)
    fingerprint(files, cache)
    assert len(reads) == 2
    assert not cache.exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"version": 1, "hashes": {}}',
        b'{"version": 2, "hashes": {"a": 3}}',
        b'{"version": 2, "hashes": {"a": "not a hash"}}',
        b" " * (5 << 20),
    ],
)
def test_a_damaged_cache_costs_a_read_and_is_replaced(
    tmp_path: Path, cache: Path, reads: list[str], damage: bytes
) -> None:
    files = make(tmp_path / "m", a=b"one")
    expected = fingerprint(files, None)
    cache.write_bytes(damage)
    assert fingerprint(files, cache) == expected
    assert fingerprint(files, cache) == expected
    assert len(reads) == 2  # without a cache, with the damaged one, and none from the good one


@pytest.mark.usefixtures("settled")
def test_the_home_of_an_engine_that_only_joins_is_made_for_the_cache(
    tmp_path: Path, cache: Path, reads: list[str]
) -> None:
    files = make(tmp_path / "m", a=b"one")
    elsewhere = tmp_path / "new" / "home" / cache.name
    first = fingerprint(files, elsewhere)
    assert elsewhere.parent.stat().st_mode & 0o777 == 0o700
    reads.clear()
    assert (fingerprint(files, elsewhere), reads) == (first, [])


@pytest.mark.usefixtures("settled")
def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "m", a=b"one")
    expected = fingerprint(files, None)
    assert fingerprint(files, files[0] / "home" / CACHE_NAME) == expected, "a file is in its way"
    cache.mkdir()
    assert fingerprint(files, cache) == expected
    assert os.listdir(cache.parent) == [CACHE_NAME]
    link = tmp_path / "home" / "link.json"
    link.symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text("kept")
    assert fingerprint(files, link) == expected
    assert (tmp_path / "elsewhere.json").read_text() == "kept"


@pytest.mark.usefixtures("settled")
def test_the_cache_is_bounded_and_forgets_the_oldest(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    old, new = make(tmp_path / "m", a=b"one", b=b"two")
    fingerprint([old], cache)
    filler = {f"1:{number}:1:1:1": "00" * 32 for number in range(MAX_ENTRIES - 1)}
    module._store(cache, filler)
    fingerprint([old], cache)
    assert len(reads) == 1
    fingerprint([new], cache)
    assert len(module._load(cache)) == MAX_ENTRIES
    fingerprint([old], cache)
    assert reads == [old.name, new.name, old.name]


@pytest.mark.usefixtures("settled")
def test_where_times_prove_nothing_every_file_is_read_at_every_start(
    tmp_path: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of a model's two versions, built with fixed times: numbers, sizes and times of files are the same."""
    one, two = make(tmp_path / "1", m=b"1" * 4096) + make(tmp_path / "2", m=b"2" * 4096)
    real = os.stat
    same = real(one)

    def built(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        return same if str(path).endswith("m.safetensors") else real(path, *rest, **named)

    monkeypatch.setattr(module.os, "stat", built)
    monkeypatch.setattr(module, "unstamped", lambda path, table: "squashfs")
    assert fingerprint([one], cache) != fingerprint([two], cache)
    assert len(reads) == 2 and not cache.exists()
    monkeypatch.setattr(module, "unstamped", lambda path, table: "")
    fingerprint([one], cache)
    monkeypatch.setattr(module, "unstamped", lambda path, table: "squashfs")
    assert fingerprint([two], cache) == fingerprint([two], None), "nor is believed what was cached by another path"


def test_a_writer_that_was_killed_leaves_one_file_at_most_and_others_are_tidied(tmp_path: Path, cache: Path) -> None:
    new = cache.with_name(f".{cache.name}.new")
    old, fresh = (cache.with_name(f".{cache.name}.{name}") for name in ("abcd_123", "live_567"))
    new.write_bytes(b"half of it" * 100)
    for left in (old, fresh):
        left.touch()
    os.utime(old, (1.0, 1.0))
    module._store(cache, {"1:1:1:1:1": "00" * 32})
    assert module._load(cache) == {"1:1:1:1:1": "00" * 32}
    assert sorted(os.listdir(cache.parent)) == sorted([fresh.name, cache.name]), "one may be of a writer that lives"


def test_a_cache_that_another_is_writing_is_left_to_it(tmp_path: Path, cache: Path) -> None:
    new = cache.with_name(f".{cache.name}.new")
    with open(new, "wb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        theirs.write(b"theirs")
        theirs.flush()
        module._store(cache, {"1:1:1:1:1": "00" * 32})
        assert new.read_bytes() == b"theirs" and not cache.exists()


def test_a_writer_killed_at_any_moment_leaves_a_whole_cache(tmp_path: Path, cache: Path) -> None:
    module._store(cache, {"1:1:1:1:1": "00" * 32})
    child = os.fork()
    if child == 0:
        module._with = lambda known, found: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        module._store(cache, {"2:2:2:2:2": "11" * 32})
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert module._load(cache) == {"1:1:1:1:1": "00" * 32}
    module._store(cache, {"2:2:2:2:2": "11" * 32})
    assert len(module._load(cache)) == 2
    assert os.listdir(cache.parent) == [cache.name]


# --- a file that changes under the reader ----------------------------------------------------


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("how", ["written", "grown", "replaced"])
def test_a_file_that_changes_while_read_is_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (file,) = make(tmp_path / "m", a=b"old")
    attempts = []
    real = module._read

    def racing(path: Path) -> tuple[int, bytes]:
        attempts.append(path)
        result = real(path)
        if len(attempts) == 1:
            time.sleep(0.02)  # see above: another tick of the kernel's clock
            match how:
                case "written":
                    path.write_bytes(b"new")
                case "grown":
                    with open(path, "ab") as grown:
                        grown.write(b"er")
                case "replaced":
                    (path.parent / "next").write_bytes(b"new")
                    os.replace(path.parent / "next", path)
        return result

    monkeypatch.setattr(module, "_read", racing)
    seen = fingerprint([file], cache)
    assert len(attempts) == 2
    monkeypatch.setattr(module, "_read", real)
    assert seen == fingerprint([file], None) == fingerprint([file], cache)


def test_a_file_that_never_rests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = make(tmp_path / "m", a=b"")
    real = module._read
    attempts = []

    def racing(path: Path) -> tuple[int, bytes]:
        attempts.append(path)
        with open(path, "ab") as grown:
            grown.write(b"x")
        return real(path)

    monkeypatch.setattr(module, "_read", racing)
    with pytest.raises(IdentityMismatch, match="kept changing"):
        fingerprint([file], None)
    assert len(attempts) == 3


# --- in the background -----------------------------------------------------------------------


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[list[Path]]:
    """A file that reading never gets through: a pipe without a writer."""
    fifo = tmp_path / "endless.safetensors"
    os.mkfifo(fifo)
    yield [fifo]


def test_the_child_finds_the_same_and_never_blocks(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "-m", a=b"one", b=b"two")
    child = Fingerprint.start(files, cache)
    assert isinstance(child.result(), PendingFingerprint | Known)
    assert until_settled(child) == Known(fingerprint(files, None))
    child.close()
    assert isinstance(child.result(), Known)


def test_the_child_runs_from_any_directory_and_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(tmp_path / "m", a=b"one")
    (tmp_path / "stepwell").mkdir()
    (tmp_path / "stepwell" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    child = Fingerprint.start([path.relative_to(tmp_path) for path in files], None)
    assert until_settled(child) == Known(fingerprint(files, None))


def test_a_failure_is_one_line_with_its_code(tmp_path: Path) -> None:
    result = until_settled(Fingerprint.start([tmp_path / "absent.safetensors"], None))
    assert isinstance(result, Failed)
    assert "SW-403" in result.reason
    assert "absent.safetensors" in result.reason
    assert "\n" not in result.reason


def test_too_long_a_command_is_a_failure_not_an_exception(tmp_path: Path) -> None:
    result = Fingerprint.start([tmp_path / ("x" * (1 << 18))], None).result()
    assert isinstance(result, Failed)
    assert "did not start" in result.reason


def test_a_killed_child_is_a_failure(endless: list[Path]) -> None:
    child = Fingerprint.start(endless, None)
    assert child.result() == PendingFingerprint()
    assert child._child is not None
    os.kill(child._child.pid, signal.SIGKILL)
    assert until_settled(child) == Failed("the fingerprint process was killed by signal 9")


def test_close_kills_the_child(endless: list[Path]) -> None:
    child = Fingerprint.start(endless, None)
    child.close()
    child.close()
    assert isinstance(child.result(), Failed)
    assert child._child is not None
    assert child._child.wait() == -signal.SIGKILL


def test_the_child_ends_with_its_parent(endless: list[Path]) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from stepwell.client.fingerprint import Fingerprint\n"
        "child = Fingerprint.start([pathlib.Path(sys.argv[1])], None)\n"
        "print(child._child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, endless[0]], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    handle = os.pidfd_open(int(parent.stdout.readline()))
    writer = os.open(endless[0], os.O_WRONLY)  # returns once the child has begun to read
    try:
        assert not select.select([handle], [], [], 0)[0]
        parent.kill()
        parent.wait()
        assert select.select([handle], [], [], 60)[0], "the child outlived its parent"
    finally:
        parent.stdout.close()
        os.close(writer)
        os.close(handle)
