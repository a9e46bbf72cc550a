"""The keyring: made once, the same for all, believed only when it is ours and whole, never shown, never replaced."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest

from stepwell.errors import AccessDenied, IntegrityError, StepwellError, Unsupported
from stepwell.vault import Keyring, keyring
from stepwell.vault.keyring import _EpochRecord, _render, _TenantRecord

ROOT = os.geteuid() == 0
KEY_A, KEY_B = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keyring"


def write(path: Path, raw: bytes, bits: int = 0o600) -> None:
    path.write_bytes(raw)
    path.chmod(bits)


def refused(path: Path, kind: type[StepwellError], code: str, shown: str = "") -> StepwellError:
    """Opening fails, and what is there stays as it is."""
    before = path.lstat()
    raw = path.read_bytes() if path.is_file() else None
    with pytest.raises(kind) as caught:
        Keyring.open(path)
    assert caught.value.code == code, caught.value
    assert shown in str(caught.value)
    after = path.lstat()
    assert (before.st_ino, before.st_mtime_ns, before.st_mode) == (after.st_ino, after.st_mtime_ns, after.st_mode)
    assert raw is None or path.read_bytes() == raw
    return caught.value


def test_a_new_keyring_has_the_default_tenant_and_stays(path: Path) -> None:
    first = Keyring.open(path)
    (tenant,) = first.tenants
    assert tenant.name == "default"
    assert [(epoch.number, len(epoch.key)) for epoch in tenant.epochs] == [(1, 32)]
    assert Keyring.open(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["keyring"]
    assert Keyring.open(path.with_name("second")).tenant("default").id_keys != tenant.id_keys


def test_the_file_is_private_whatever_the_umask(path: Path) -> None:
    old = os.umask(0)
    try:
        Keyring.open(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_says_how_its_keys_are_wrapped(path: Path) -> None:
    Keyring.open(path)
    record = json.loads(path.read_bytes())
    assert (record["format"], record["version"], record["wrap"]) == ("stepwell keyring", 1, "file")
    record["checksum"], checksum = "", record["checksum"]
    assert blake3.blake3(json.dumps(record, separators=(",", ":")).encode()).hexdigest() == checksum


def test_id_keys_come_newest_first_and_are_derived(path: Path) -> None:
    write(path, _render([_TenantRecord("t", [_EpochRecord(2, KEY_B), _EpochRecord(1, KEY_A)])]))
    keys = Keyring.open(path).tenant("t")
    assert [epoch.number for epoch in keys.epochs] == [2, 1]
    # Fixed for ever: another derivation would orphan every block.
    assert [key.hex() for key in keys.id_keys] == [
        "df554f0b069b879f2f9bd3c95dbd7991a68daa0d4a1e257438996c510985fb5e",
        "5720aa671b6dcdbf426f6f4aecd77f938930c637ac8e42e9079011675df92a4c",
    ]


def test_a_tenant_without_keys_is_refused(path: Path) -> None:
    with pytest.raises(AccessDenied) as caught:
        Keyring.open(path).tenant("Default")
    assert caught.value.code == "SW-607"
    assert "Default" not in str(caught.value)


def test_keys_are_never_shown(path: Path) -> None:
    ring = Keyring.open(path)
    (epoch,) = ring.tenants[0].epochs
    key = bytes(epoch.key)
    record = _TenantRecord("t", [_EpochRecord(1, key)])
    text = f"{ring} {ring!r} {ring.tenants[0]!r} {epoch!r} {record!r}"
    for hidden in (
        repr(key),
        repr(key)[2:10],
        key.hex()[:8],
        base64.b64encode(key).decode()[:8],
    ):
        assert hidden not in text


def test_any_changed_byte_and_any_cut_is_found(path: Path) -> None:
    Keyring.open(path)
    raw = path.read_bytes()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << chance.randrange(8)
        write(path, bytes(flipped))
        with pytest.raises((IntegrityError, Unsupported)):
            Keyring.open(path)
        write(path, raw[:position])
        refused(path, IntegrityError, "SW-303")
    for longer in (raw + b"\n", b" " + raw, raw + raw):
        write(path, longer)
        refused(path, IntegrityError, "SW-303")


def changed(**fields: Any) -> bytes:
    """A keyring whose checksum is right although its contents are not."""
    epochs = [{"number": 1, "key": base64.b64encode(KEY_A).decode()}]
    record = {"format": "stepwell keyring", "version": 1, "wrap": "file", "tenants": [{"name": "t", "epochs": epochs}]}
    record |= fields
    bare = json.dumps(record | {"checksum": ""}, separators=(",", ":")).encode()
    whole = record | {"checksum": blake3.blake3(bare).hexdigest()}
    return json.dumps(whole, separators=(",", ":")).encode() + b"\n"


def epoch(number: int, key: bytes = KEY_A) -> dict[str, object]:
    return {"number": number, "key": base64.b64encode(key).decode()}


def tenant(*epochs: dict[str, object], name: str = "t") -> dict[str, object]:
    return {"name": name, "epochs": list(epochs)}


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"", "only a part"),
        (b"[]", "not a keyring"),
        (b"[" * 100_000, "not a keyring"),
        (b'{"x":' + b"[" * 100_000, "not a keyring"),
        (b"\xff\xfe", "not a keyring"),
        (b" " * ((1 << 20) + 1), "1 MiB"),
        (changed(format="other"), "checksum"),
        (changed(extra=1), "not a keyring"),
        (changed(tenants=[tenant(epoch(1)), tenant(epoch(1))]), "twice"),
        (changed(tenants=[tenant()]), "not in order"),
        (changed(tenants=[tenant(epoch(1), epoch(2))]), "not in order"),
        (changed(tenants=[tenant(epoch(1), epoch(1))]), "not in order"),
        (changed(tenants=[tenant(epoch(1, KEY_A[:31]))]), "length"),
        (changed(tenants=[tenant(epoch(1, b""))]), "length"),
    ],
)
def test_what_is_no_whole_keyring_is_refused(path: Path, raw: bytes, shown: str) -> None:
    write(path, raw)
    refused(path, IntegrityError, "SW-303", shown)


def test_the_helper_of_these_tests_writes_what_is_accepted(path: Path) -> None:
    write(path, changed(tenants=[tenant(epoch(2, KEY_B), epoch(1))]))
    assert len(Keyring.open(path).tenant("t").epochs) == 2


@pytest.mark.parametrize("fields", [{"version": 2}, {"wrap": "kms"}, {"version": 2, "future": []}], ids=str)
def test_a_keyring_of_another_version_is_not_called_corrupt(path: Path, fields: dict[str, Any]) -> None:
    write(path, changed(**fields))
    refused(path, Unsupported, "SW-711")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o601], ids=oct)
def test_a_keyring_that_is_open_to_others_is_refused(path: Path, bits: int) -> None:
    Keyring.open(path)
    path.chmod(bits)
    refused(path, AccessDenied, "SW-605", f"{bits:04o}")


def test_a_foreign_keyring_is_refused(path: Path) -> None:
    if not ROOT:
        path = Path("/etc/passwd")
        shown = "user with id 0"
    else:
        Keyring.open(path)
        os.chown(path, 65534, 65534)
        shown = "user with id 65534"
    refused(path, AccessDenied, "SW-605", shown)


def make_link(path: Path) -> None:
    Keyring.open(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [make_link, make_fifo, Path.mkdir])
def test_what_is_no_regular_file_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    refused(path, AccessDenied, "SW-605")


def test_a_dangling_link_is_not_filled(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    refused(path, AccessDenied, "SW-605")
    assert os.listdir(path.parent) == ["keyring"]


def test_a_directory_that_is_missing_is_reported(path: Path) -> None:
    with pytest.raises(AccessDenied, match="No such file"):
        Keyring.open(path / "keyring")


def _open_at_once(path: Path, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(tuple(map(bytes, Keyring.open(path).tenant("default").id_keys)))


def test_processes_that_create_it_at_once_get_the_same_keys(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(2):
        path = tmp_path / f"{turn}" / "keyring"
        path.parent.mkdir()
        barrier, answers = context.Barrier(6), context.Queue()
        children = [context.Process(target=_open_at_once, args=(path, barrier, answers)) for _ in range(6)]
        for child in children:
            child.start()
        keys = {answers.get(timeout=60) for _ in children}
        for child in children:
            child.join()
        assert keys == {Keyring.open(path).tenant("default").id_keys}
        assert os.listdir(path.parent) == ["keyring"]


@pytest.mark.parametrize("swept", [False, True])
def test_the_first_creator_wins(path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool) -> None:
    """Another process finishes just before our link; it may also have swept our file away."""
    winner = _render([_TenantRecord("default", [_EpochRecord(7, KEY_A)])])

    def late(source: Path, target: Path, **options: Any) -> None:
        write(path, winner)
        if swept:
            source.unlink()
        link(source, target, **options)

    link = os.link
    monkeypatch.setattr(os, "link", late)
    assert Keyring.open(path).tenant("default").epochs[0].number == 7
    assert path.read_bytes() == winner
    assert os.listdir(path.parent) == ["keyring"]


def test_a_new_keyring_is_on_disk_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, link = os.fsync, os.link

    def recording_fsync(fd: int) -> None:
        order.append(("fsync", os.path.isdir(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size > 0))
        fsync(fd)

    def recording_link(*names: Path, **options: Any) -> None:
        order.append(("link",))
        link(*names, **options)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "link", recording_link)
    Keyring.open(path)
    assert [step[:2] for step in order] == [("fsync", False), ("link",), ("fsync", True)]
    assert order[0][2]
    order.clear()
    Keyring.open(path)
    assert order == []


def test_what_a_killed_creator_left_is_removed_and_nothing_else(path: Path) -> None:
    for name in (f"keyring.{'0a' * 8}.new", "keyring.bak", "keyring.new", "keyring.mine.new"):
        write(path.with_name(name), b"x")
    Keyring.open(path)
    assert sorted(os.listdir(path.parent)) == ["keyring", "keyring.bak", "keyring.mine.new", "keyring.new"]


def test_what_cannot_be_removed_is_in_nobodys_way(path: Path) -> None:
    Keyring.open(path)
    leftover = path.with_name(f"keyring.{'0a' * 8}.new")
    leftover.mkdir()
    assert Keyring.open(path).tenants
    assert leftover.exists()


def test_a_failed_creation_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*names: Path, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(AccessDenied, match="No space"):
        Keyring.open(path)
    assert os.listdir(path.parent) == []


def test_leftovers_stay_while_the_keyring_is_not_believed(path: Path) -> None:
    """They may be the only copy."""
    leftover = path.with_name(f"keyring.{'0a' * 8}.new")
    write(leftover, b"x")
    write(path, b"")
    refused(path, IntegrityError, "SW-303")
    assert leftover.exists()


def test_the_tenant_of_engines_without_another_is_the_default() -> None:
    assert keyring.DEFAULT_TENANT == "default"
