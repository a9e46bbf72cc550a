"""Private files: what is believed, what is refused and why, and that a file is whole or not there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.io import private

CONTENT = b"a secret"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key"


def test_a_private_file_is_read_as_it_was_created(path: Path) -> None:
    old = os.umask(0)
    try:
        private.create(path, CONTENT)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert private.read(path, len(CONTENT)) == CONTENT
    assert os.listdir(path.parent) == ["key"]


def test_an_existing_file_is_never_replaced(path: Path) -> None:
    private.create(path, CONTENT)
    private.create(path, b"another")
    assert private.read(path, 100) == CONTENT
    assert os.listdir(path.parent) == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_file_that_is_open_to_others_is_refused(path: Path, mode: int) -> None:
    private.create(path, CONTENT)
    path.chmod(mode)
    with pytest.raises(private.NotPrivate, match=f"mode is 0{mode:o}"):
        private.read(path, 100)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private.create(path, CONTENT)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(private.NotPrivate, match=f"user with id {path.stat().st_uid}"):
        private.read(path, 100)


def _link(path: Path) -> None:
    private.create(path.with_name("real"), CONTENT)
    path.symlink_to(path.with_name("real"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_link, "symbolic link"),
        (lambda path: os.mkfifo(path, 0o600), "not a regular file"),
        (lambda path: path.mkdir(0o700), "not a regular file"),
    ],
    ids=["link", "pipe", "directory"],
)
def test_only_regular_files_are_read_and_none_is_waited_for(path: Path, make: Callable[[Path], None], why: str) -> None:
    make(path)
    signal.alarm(5)
    try:
        with pytest.raises(private.NotPrivate, match=why):
            private.read(path, 100)
    finally:
        signal.alarm(0)


def test_no_more_is_read_than_was_asked_for(path: Path) -> None:
    private.create(path, CONTENT)
    with pytest.raises(private.TooLarge):
        private.read(path, len(CONTENT) - 1)
    with pytest.raises(FileNotFoundError):
        private.read(path.with_name("missing"), 100)


def test_a_file_is_on_disk_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, link = os.fsync, os.link

    def recording_fsync(fd: int) -> None:
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else f"file of {os.fstat(fd).st_size}")
        fsync(fd)

    def recording_link(*names: Path, **options: Any) -> None:
        order.append("link")
        link(*names, **options)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "link", recording_link)
    private.create(path, CONTENT)
    assert order == [f"file of {len(CONTENT)}", "link", "folder"]


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_file_that_could_not_be_created_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        private.create(path, CONTENT)
    assert os.listdir(path.parent) == []


def test_leftovers_are_the_files_that_were_being_written(path: Path) -> None:
    left = private.write_beside(path, CONTENT)
    for name in ("key", "key.new", "key.0123.new", f"other.{'a' * 16}.new"):
        path.with_name(name).touch()
    assert list(private.leftovers(path)) == [left]
