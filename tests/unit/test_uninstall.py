"""What stepwell made is deleted, by name and only after being asked; nothing else is, and what is in use is not."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from wells import invoke

from stepwell.client import control, start
from stepwell.errors import BackendDown
from stepwell.io.paths import Rendezvous, prepare_home
from stepwell.ops.uninstall import LeftFolder, remove, survey
from stepwell.serve.home import disks
from stepwell.serve.home.disks import remember, remembered
from stepwell.vault.keyfile import CONTEXT_KEY_NAME, open_key
from stepwell.vault.keyring import Keyring

SEGMENT = f"{7:016x}.seg"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that stepwell makes, and in each place something that it does not make."""
    for name in [name for name in os.environ if name.startswith("STEPWELL_")]:
        monkeypatch.delenv(name)
    for name, value in (("TMPDIR", tmp_path / "t"), ("XDG_CACHE_HOME", tmp_path / "cache")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for name in ("t", "disk", "cache/stepwell/models/m", "cache/stepwell/demo-12345678", "theirs"):
        (tmp_path / name).mkdir(parents=True)
    home = tmp_path / "home"
    prepare_home(home)
    Keyring.open(home / "keyring")
    open_key(home / CONTEXT_KEY_NAME)
    for name in (
        "stepwell.log",
        "stepwell.log.1",
        "fingerprints.json",
        ".fingerprints.json.abcd1234",
        ".fingerprints.json.new",
    ):
        (home / name).write_text("x")
    (home / "stepwell.yaml").write_text(f"disk: {tmp_path}/disk:50%\n")
    (tmp_path / "disk" / SEGMENT).write_bytes(bytes(1 << 20))
    (tmp_path / "disk" / "lock").touch()
    (tmp_path / "disk" / "README.txt").write_text("This directory belongs to stepwell")
    (tmp_path / "cache/stepwell/models/m/weights").write_bytes(bytes(1 << 20))
    (tmp_path / "theirs" / "precious").write_text("precious")
    return tmp_path


def parts_of(base: Path) -> dict[str, LeftFolder]:
    return {part.kind: part for part in survey(base / "home", [base / "disk"], base / "cache/stepwell")}


def names(base: Path) -> set[str]:
    return {str(path.relative_to(base)) for path in base.rglob("*") if path.parts[len(base.parts)] != "t"}


def test_all_that_we_make_is_found_with_its_size_and_deleted(base: Path) -> None:
    parts = parts_of(base)
    assert [part.kind for part in parts.values()] == ["data", "home", "demo"]
    assert parts["data"].nbytes >= 1 << 20 and parts["demo"].nbytes >= 1 << 20
    assert parts["home"].others == ("stepwell.yaml",)
    before = names(base)
    removed = remove(base / "home", parts.values())
    assert before - names(base) > {"home/keyring", "disk", "cache/stepwell", f"disk/{SEGMENT}"}
    assert names(base) == {"home", "home/stepwell.yaml", "cache", "theirs", "theirs/precious"}
    assert [part.left for part in removed] == [(), (("stepwell.yaml", "not ours"),), ()]
    assert survey(base / "home", [base / "disk"], base / "none")[0].ours == ()


STRANGE = {
    "disk": ["video.seg", f"{SEGMENT}.bak", "0123456789ABCDEF.seg", "notes.txt", "keyring"],
    "home": ["keyring.old", "stepwell.log.gz", "notes.txt", SEGMENT, "lock"],
    "cache/stepwell": ["notes.txt", "demo"],
}


def test_what_others_put_there_stays(base: Path) -> None:
    for folder, files in STRANGE.items():
        for name in files:
            (base / folder / name).write_text("precious")
    (base / "disk" / f"{1:016x}.seg").mkdir()
    (base / "disk" / f"{2:016x}.seg").symlink_to(base / "theirs" / "precious")
    (base / "home" / "fingerprints.json").unlink()
    (base / "home" / "fingerprints.json").symlink_to(base / "theirs" / "precious")
    (base / "cache/stepwell/demo-87654321").symlink_to(base / "theirs")
    (base / "cache/stepwell/models/link").symlink_to(base / "theirs")
    os.mkfifo(base / "disk" / f"{3:016x}.seg")
    removed = remove(base / "home", parts_of(base).values())
    kept = {f"{folder}/{name}" for folder, files in STRANGE.items() for name in files}
    kept |= {f"disk/{n:016x}.seg" for n in (1, 2, 3)} | {"home/fingerprints.json", "cache/stepwell/demo-87654321"}
    assert kept <= names(base) and not (base / "disk" / SEGMENT).exists()
    assert (base / "theirs" / "precious").read_text() == "precious"
    assert {name for name, _ in removed[0].left} == {name.removeprefix("disk/") for name in kept if "disk/" in name}


def test_names_that_others_give_too_are_ours_only_with_our_contents(base: Path) -> None:
    (base / "disk" / "README.txt").write_text("my videos")
    (base / "disk" / "lock").write_text("4711")
    remove(base / "home", parts_of(base).values())
    assert {path.name for path in (base / "disk").iterdir()} == {"README.txt", "lock"}


def test_files_of_another_user_stay(base: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(base / "disk" / SEGMENT, 65534, 65534)
    assert SEGMENT in parts_of(base)["data"].others


def test_a_directory_in_whose_place_there_is_a_link_is_no_part(base: Path) -> None:
    real = (base / "disk").rename(base / "elsewhere")
    (base / "disk").symlink_to(real)
    parts = parts_of(base)
    assert "data" not in parts
    data = LeftFolder("data", base / "disk", (), ())
    assert remove(base / "home", [data])[0].names == ()
    assert (real / SEGMENT).exists()


@pytest.mark.parametrize(("lock", "kind"), [("disk/lock", "data"), ("cache/stepwell/demo-12345678/lock", "demo")])
def test_what_another_process_uses_stays(base: Path, lock: str, kind: str) -> None:
    with (base / lock).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (removed,) = remove(base / "home", [parts_of(base)[kind]])
    assert any("in use" in why for _, why in removed.left)
    assert (base / lock).exists() and (base / "disk" / SEGMENT).exists()


def test_lock_and_socket_go_with_the_home(base: Path) -> None:
    """As a killed well left them."""
    ours, named = start.rendezvous(base / "home"), Rendezvous.named(base / "t" / "well.sock")
    for place in (ours, named):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(place.socket))
        place.lock.touch()
    remove(base / "home", parts_of(base).values(), named.socket)
    assert not any(path.exists() for place in (ours, named) for path in (place.lock, place.socket))
    remove(base / "home", [], base / "no-such-folder" / "well.sock")
    assert not ours.lock.exists(), "asking leaves none either"


def test_a_well_whose_lock_somebody_cleaned_away_is_not_deleted_under(base: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(start.rendezvous(base / "home").socket))
        listener.listen()
        with pytest.raises(BackendDown) as caught:
            remove(base / "home", parts_of(base).values())
    assert caught.value.code == "SW-501" and (base / "home" / "keyring").exists()


def test_nothing_is_deleted_under_a_running_well(base: Path) -> None:
    with start.lock(start.rendezvous(base / "home").lock), pytest.raises(BackendDown) as caught:
        remove(base / "home", parts_of(base).values())
    assert caught.value.code == "SW-501"
    assert (base / "home" / "keyring").exists() and (base / "disk" / SEGMENT).exists()


# --- directories that no setting names --------------------------------------------------------------------------------


def tier(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "lock").touch()
    (path / SEGMENT).write_bytes(bytes(4096))
    return path


def test_what_home_remembers_is_found_once_and_deleted(base: Path) -> None:
    odd = tier(base / os.fsdecode(b"a\nb\xff") / "disk")
    (base / "other-name").symlink_to(odd.parent)
    remember(base / "home", [base / "disk", base / "other-name" / "disk"])
    remember(base / "home", [base / "gone"])
    assert remembered(base / "home") == [base / "disk", odd, base / "gone"]
    assert stat.S_IMODE((base / "home" / "disks.json").stat().st_mode) == 0o600
    parts = survey(base / "home", [base / "disk", base / "other-name" / "disk"], base / "none")
    assert [part.kind for part in parts] == ["data", "data", "home"]
    (base / "home" / "stepwell.yaml").unlink()
    (base / "home" / "disks.json.new").touch()
    remove(base / "home", parts)
    assert not odd.exists() and not (base / "disk").exists() and not (base / "home").exists()


def test_the_list_is_bounded_and_whatever_is_in_it_does_no_harm(base: Path) -> None:
    home = base / "home"
    remember(home, [Path(f"/none/{n}") for n in range(disks.MAX_DIRECTORIES + 1)])
    assert remembered(home) == [Path(f"/none/{n}") for n in range(1, disks.MAX_DIRECTORIES + 1)]
    before = (home / "disks.json").stat().st_mtime_ns
    remember(home, [Path("/none/7")])
    assert (home / "disks.json").stat().st_mtime_ns == before, "what is known is not written again"
    for raw in (b"", b"\xff", b"{}", b"[" * 100_000, b'["relative", 7, "/a\\u0000b"]'):
        (home / "disks.json").write_bytes(raw)
        assert remembered(home) == []
    (home / "disks.json").unlink()
    (home / "disks.json").symlink_to(base / "theirs" / "precious")
    assert remembered(home) == []
    remember(home, [base / "disk"])
    assert remembered(home) == [base / "disk"]
    assert (base / "theirs" / "precious").read_text() == "precious"


# --- the command ------------------------------------------------------------------------------------------------------


def uninstall(base: Path, *arguments: str) -> dict[str, object]:
    code, said = invoke("uninstall", "--home", str(base / "home"), "--json", *arguments)
    assert code == 0, said
    answer: dict[str, object] = json.loads(said)
    return answer


@pytest.fixture
def well(base: Path) -> Iterator[None]:
    """A well of that home runs; it lingers long enough for the test."""
    (base / "home" / "stepwell.yaml").unlink()
    start.find_or_start(base / "home", {"host": "64MiB"})
    yield
    if control.pid(base / "home") is not None:
        control.stop(base / "home")


def test_without_a_terminal_it_only_lists(base: Path, well: None) -> None:
    before = names(base)
    answer = uninstall(base)
    assert answer["deleted"] is False and len(answer["parts"]) == 2  # type: ignore[arg-type]
    assert names(base) == before
    assert control.pid(base / "home"), "not even the well is ended"


def test_it_ends_the_well_and_deletes(base: Path, well: None) -> None:
    answer = uninstall(base, "--yes", "--only", "home")
    assert answer["deleted"] is True
    assert not (base / "home").exists() and (base / "cache/stepwell/models").exists()
    assert control.pid(base / "home") is None
    assert list(start.rendezvous(base / "home").lock.parent.iterdir()) == []


def test_a_disk_tier_that_only_an_engine_knew_of_is_deleted(base: Path) -> None:
    (base / "home" / "stepwell.yaml").unlink()
    place, flagged = base / "disk", base / "deep" / "flagged"
    start.find_or_start(base / "home", {"host": "64MiB", "disk": f"{flagged}:64MiB", "disk_reserve": "1MiB"})
    control.stop(base / "home")
    (flagged / SEGMENT).write_bytes(bytes(4096))
    uninstall(base, "--yes", "--only", "data")
    assert not flagged.exists() and (place / SEGMENT).exists() and (base / "home" / "keyring").exists()
    uninstall(base, "--yes", "--only", "home")
    assert not (base / "home").exists()


def test_where_there_is_nothing_it_does_not_offer_to_delete_it(base: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "uninstall", "--home", str(base / "none"), "--only", "home"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout == "there is nothing of stepwell here\nnothing was deleted\n"
    command[command.index(str(base / "none"))] = str(base / "home")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "nothing was deleted; --yes deletes it"
