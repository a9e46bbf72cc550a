"""Which directories a disk tier takes, and what it says of the others."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.errors import StepwellError
from stepwell.tiers.disk import site as module
from stepwell.tiers.disk.site import take
from stepwell.tiers.disk.tier import Site
from stepwell.units import parse_amount

RESERVE = parse_amount("1MiB")


def taken(path: Path, size: str = "64MiB") -> Site:
    return take(path, parse_amount(size), RESERVE)


def refused(path: Path, size: str = "64MiB") -> StepwellError:
    with pytest.raises(StepwellError) as caught:
        taken(path, size)
    assert caught.value.fix
    return caught.value


def test_a_new_directory_is_made_locked_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    site = taken(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert sorted(os.listdir(path)) == ["README.txt", "lock"]
    assert all(stat.S_IMODE((path / name).stat().st_mode) == 0o600 for name in os.listdir(path))
    assert site.limit == 64 << 20
    site.files.close()


def test_one_directory_has_one_well(tmp_path: Path) -> None:
    site = taken(tmp_path)
    error = refused(tmp_path)
    assert error.code == "SW-506"
    assert str(tmp_path) in error.what
    site.files.close()
    taken(tmp_path).files.close()


def test_a_readme_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("mine")
    taken(tmp_path).files.close()
    assert (tmp_path / "README.txt").read_text() == "mine"


def _a_file(path: Path) -> None:
    path.write_text("x")


def _a_link(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to(path.parent / "real")


def _open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def _of_somebody_else(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def _with_a_link_for_a_lock(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "lock").symlink_to(path.parent / "elsewhere")


def _below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("x")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_a_file, "not a directory"),
        (_a_link, "symbolic link"),
        (_open_to_others, "0770"),
        (_of_somebody_else, "12345"),
        (_with_a_link_for_a_lock, "symbolic links"),
        (_below_a_file, "Not a directory"),
    ],
)
def test_what_cannot_be_used_is_refused_and_left_alone(tmp_path: Path, make: Callable[[Path], None], why: str) -> None:
    path = tmp_path / "parent" / "disk"
    path.parent.mkdir()
    make(path)
    before = sorted(tmp_path.rglob("*"))
    error = refused(path)
    assert error.code == "SW-608"
    assert why in error.why
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "lustre", "tmpfs", "ramfs"])
def test_filesystems_that_are_no_local_disk(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "filesystem", lambda path: kind)
    error = refused(tmp_path)
    assert error.code == "SW-609"
    assert kind in error.what
    assert not os.listdir(tmp_path)


def test_sizes_that_cannot_work(tmp_path: Path) -> None:
    for size in ("63MiB", "900PiB", "100%"):
        error = refused(tmp_path, size)
        assert error.code == "SW-114"
        assert error.fix
    assert not (tmp_path / "README.txt").exists()
    taken(tmp_path).files.close()
