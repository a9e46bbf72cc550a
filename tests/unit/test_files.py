"""Files of one directory: what is opened, what space is promised, what counts as written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepwell.io import files as files_module
from stepwell.io import whole
from stepwell.io.files import SystemFiles
from stepwell.io.staging import make

NBYTES = 4 * 4096


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, direct: bool) -> None:
    """Nor does a pipe without a writer hold anybody up."""
    path, outside = tmp_path / "a.seg", tmp_path / "outside"
    outside.write_bytes(bytes(NBYTES))
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    files = SystemFiles(tmp_path)
    files.direct = files.direct and direct
    with pytest.raises(OSError) as raised:
        files.open("a.seg")
    assert raised.value.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR)
    with files.open("outside") as file:
        assert file.size() == NBYTES
    files.close()


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    files, before = SystemFiles(tmp_path), os.umask(0)
    try:
        files.create("a.seg", NBYTES).close()
    finally:
        os.umask(before)
    assert (tmp_path / "a.seg").stat().st_mode & 0o777 == 0o600
    files.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_space_that_there_is_not_is_not_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(files_module, "_fallocate", lambda fd, mode, offset, nbytes: code)
    files = SystemFiles(tmp_path)
    with pytest.raises(OSError) as raised:
        files.create("a.seg", NBYTES)
    assert raised.value.errno == code
    assert files.names() == [], "nor is a part of it left"
    files.close()


@pytest.mark.parametrize("written", [0, 100, 4096 + 512])
def test_a_short_write_is_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    files = SystemFiles(tmp_path)
    with files.create("a.seg", NBYTES) as file:
        counts = iter([4096, written])
        monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: next(counts))
        with pytest.raises(OSError, match="short write"):
            file.write(make(NBYTES)[:NBYTES], 0)
        counts = iter([4096, 2 * 4096, 4096])
        file.write(make(NBYTES)[:NBYTES], 0)
    files.close()


def test_a_list_is_on_disk_before_it_has_its_name_and_its_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(fd: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{fd}") else f"{os.fstat(fd).st_size} bytes"
        done.append(f"{kind} synced")
        fsync(fd)

    def recording_replace(*names: Path) -> None:
        done.append("named")
        replace(*names)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    whole.replace(tmp_path, "list", "[]")
    assert done == ["2 bytes synced", "named", "folder synced"]


def test_a_list_is_replaced_as_a_whole_and_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "list.new").write_text("what a killed process left, and long")
        (tmp_path / "list.new").chmod(0o600)
        for text in ("[1, 2, 3]", "[]"):
            whole.replace(tmp_path, "list", text)
            assert (tmp_path / "list").read_text() == text
    finally:
        os.umask(before)
    assert (tmp_path / "list").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["list"]
    (tmp_path / "list.new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        whole.replace(tmp_path, "list", "[4]")
    assert (tmp_path / "list").read_text() == "[]" and not (tmp_path / "elsewhere").exists()
