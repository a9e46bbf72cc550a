"""The key of saved contexts: one file, believed only if nobody else could have written or read it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.errors import AccessDenied, IntegrityError, StepwellError
from stepwell.longctx.saved.contexts import context_key


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_it_is_made_once_and_private(home: Path) -> None:
    old = os.umask(0)
    try:
        key = bytes(context_key(home))
    finally:
        os.umask(old)
    assert len(key) == 32 and len(set(key)) > 8
    assert (home / "longctx.key").read_bytes() == key == bytes(context_key(home))
    assert (home / "longctx.key").stat().st_mode & 0o7777 == 0o600
    assert sorted(os.listdir(home)) == ["README.txt", "longctx.key"]


def test_all_who_make_it_at_once_have_the_same(home: Path) -> None:
    home.mkdir(mode=0o700)
    together, keys = threading.Barrier(8), []

    def ask() -> None:
        together.wait()
        keys.append(bytes(context_key(home)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1


def link(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


def folder(key: Path) -> None:
    key.unlink()
    key.mkdir()


def pipe(key: Path) -> None:
    key.unlink()
    os.mkfifo(key, 0o600)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda key: key.chmod(0o640), AccessDenied, "0640.*SW-610"),
        (lambda key: key.chmod(0o602), AccessDenied, "0602.*SW-610"),
        (link, AccessDenied, "symbolic link.*SW-610"),
        (folder, AccessDenied, "not a regular file.*SW-610"),
        (pipe, AccessDenied, "not a regular file.*SW-610"),
        (lambda key: key.write_bytes(bytes(31)), IntegrityError, "SW-306"),
        (lambda key: key.write_bytes(bytes(33)), IntegrityError, "SW-306"),
        (lambda key: key.write_bytes(b""), IntegrityError, "SW-306"),
    ],
)
def test_what_is_not_believed(home: Path, spoil: Callable[[Path], None], error: type[StepwellError], said: str) -> None:
    context_key(home)
    spoil(home / "longctx.key")
    with pytest.raises(error, match=said):
        context_key(home)
    assert os.path.lexists(home / "longctx.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_key_of_another_user_is_not_believed(home: Path) -> None:
    context_key(home)
    os.chown(home / "longctx.key", 12345, 12345)
    with pytest.raises(AccessDenied, match=r"12345.*SW-610"):
        context_key(home)


def test_a_home_that_others_can_write_is_not_used(home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(AccessDenied, match="SW-602"):
        context_key(home)
    assert os.listdir(home) == []
