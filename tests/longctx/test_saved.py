"""A saved context comes back bit for bit, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.block.frame import FrameHeader, frame_bytes
from stepwell.errors import AccessDenied, BackendDown, CapacityError, IdentityMismatch, IntegrityError, StepwellError
from stepwell.longctx.saved import form as saved_format
from stepwell.longctx.saved.container import ContextReader, write_context

from . import golden
from .golden import FINGERPRINT, KEY

PAGE = 4096
MANIFEST: dict[str, Any] = {"fingerprint": FINGERPRINT, "lengths": [3, 5], "policy": {"name": "x", "k": None}}


def some(seed: int = 1) -> dict[str, torch.Tensor]:
    """Three frames of one size, a small one, and an empty one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(50, 10, generator=generator),
        "b": torch.randn(500, generator=generator),
        "c": torch.randint(-9, 9, (250,), generator=generator),
        "small": torch.tensor(7, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }


def read_context(path: Path, key: bytes, fingerprint: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with closing(ContextReader(path, key, fingerprint)) as reader:
        return reader.manifest, {name: reader.read(name) for name in reader.names}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document.ctx"


@pytest.fixture
def saved(path: Path) -> Path:
    write_context(path, KEY, MANIFEST, some())
    return path


def frames(path: Path) -> list[bytes]:
    """As they lie in the file."""
    raw, found = path.read_bytes(), []
    while raw:
        header = FrameHeader.parse(raw[:PAGE])
        assert header is not None
        found.append(raw[: frame_bytes(header.payload)])
        raw = raw[len(found[-1]) :]
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and saved_format.content(a).tobytes() == saved_format.content(b).tobytes()
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def refused(path: Path, error: type[StepwellError], code: str, key: bytes = KEY, mark: bytes = FINGERPRINT) -> None:
    with pytest.raises(error, match=code):
        read_context(path, key, mark)


@pytest.mark.parametrize("dtype", saved_format._DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaNs of all kinds too, in several frames, from views that do not lie in order."""
    monkeypatch.setattr(saved_format, "PIECE", 9000)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (8000 * dtype.itemsize,), dtype=torch.uint8)
    whole = raw.view(dtype).view(80, 100)
    tensors = {"whole": whole, "turned": whole.T, "row": whole[3], "one": whole[0, 0], "none": whole[:0]}
    write_context(path, KEY, MANIFEST, tensors)
    manifest, got = read_context(path, KEY, FINGERPRINT)
    assert manifest == MANIFEST
    assert same(got, tensors)
    assert len(frames(path)) == 1 + 2 * -(-8000 * dtype.itemsize // 9000) + 2


def test_tensors_are_read_one_by_one(saved: Path) -> None:
    reader = ContextReader(saved, KEY, FINGERPRINT)
    assert reader.names == tuple(some())
    assert same({"c": reader.read("c"), "a": reader.read("a")}, {"c": some()["c"], "a": some()["a"]})
    with pytest.raises(KeyError):
        reader.read("d")
    reader.close()
    reader.close()


def test_nothing_is_in_clear_and_no_key_is_used_twice(path: Path) -> None:
    tensors = {"long name of a tensor": torch.full((5000,), 7, dtype=torch.uint8)}
    files = []
    for _ in range(2):
        write_context(path, KEY, MANIFEST, tensors)
        files.append(frames(path))
        whole = path.read_bytes()
        assert bytes([7]) * 16 not in whole and b"long name" not in whole and FINGERPRINT not in whole
    assert not {frame[PAGE:] for frame in files[0]} & {frame[PAGE:] for frame in files[1]}
    headers = [FrameHeader.parse(frame[:PAGE]) for frame in files[0]]
    assert len({header.nonce for header in headers if header}) == len(headers)


def test_every_flipped_bit_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    rng = np.random.default_rng(4)
    edges = {at for frame in range(0, len(whole), PAGE) for at in (frame, frame + PAGE - 1)}
    for at in sorted(edges | set(range(200)) | set(rng.integers(0, len(whole), 300).tolist())):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(rng.integers(8))
        saved.write_bytes(flipped)
        refused(saved, IntegrityError, "SW-306")


def test_every_other_length_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    rng = np.random.default_rng(5)
    for length in [0, 1, len(whole) - 1, *range(0, len(whole), PAGE), *rng.integers(0, len(whole), 50).tolist()]:
        saved.write_bytes(whole[:length])
        refused(saved, IntegrityError, "SW-306")
    for more in (b"\0", bytes(PAGE), frames_of(whole)[-1]):
        saved.write_bytes(whole + more)
        refused(saved, IntegrityError, "SW-306")


def frames_of(whole: bytes) -> list[bytes]:
    return [whole[at : at + 2 * PAGE] for at in range(0, len(whole), 2 * PAGE)]


def test_frames_only_open_in_their_place_in_their_file(saved: Path, tmp_path: Path) -> None:
    write_context(tmp_path / "other", KEY, MANIFEST, some(2))
    mine, theirs = frames(saved), frames(tmp_path / "other")
    assert [len(frame) for frame in mine] == [len(frame) for frame in theirs]
    for order in ([0, 2, 1, 3, 4], [0, 1, 1, 3, 4], [1, 0, 2, 3, 4]):
        saved.write_bytes(b"".join(mine[number] for number in order))
        refused(saved, IntegrityError, "SW-306")
    for number in range(5):
        saved.write_bytes(b"".join([*mine[:number], theirs[number], *mine[number + 1 :]]))
        refused(saved, IntegrityError, "SW-306")


def test_another_key_model_or_version(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(saved, AccessDenied, "SW-610", key=bytes(32))
    refused(saved, AccessDenied, "SW-610", key=KEY[:31])
    refused(saved, IdentityMismatch, "another configuration.*SW-407", mark=bytes(32))
    with pytest.raises(ValueError, match="fingerprint"):
        read_context(saved, KEY, b"")
    with pytest.raises(AccessDenied, match="SW-610"):
        write_context(saved, KEY[:31], MANIFEST, some())
    with monkeypatch.context() as later:
        later.setattr(saved_format, "VERSION", 2)
        write_context(saved, KEY, MANIFEST, some())
    refused(saved, IdentityMismatch, "version 2 .*SW-407")


def test_a_sealed_frame_that_is_no_context(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_format, "_MAGIC", b"stepwell xyz")
    write_context(saved, KEY, MANIFEST, some())
    monkeypatch.undo()
    refused(saved, IntegrityError, "SW-306")


def test_a_manifest_that_no_writer_writes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody who has the key: refused before anything is allocated for it."""
    pack = saved_format.Manifest.pack
    lies = (
        lambda one: b"\xc1",
        lambda one: pack(one).replace(b"float32", b"float31"),
        lambda one: pack(one).replace(b"\xcd\x01\xf4", b"\xcd\xff\xf4"),  # 500 numbers say that they are 65524
        lambda one: b"\x91" * 5000,
    )
    for lie in lies:
        monkeypatch.setattr(saved_format.Manifest, "pack", lie)
        write_context(saved, KEY, MANIFEST, some())
        refused(saved, IntegrityError, "SW-306")


def test_the_file_is_private_and_alone(path: Path) -> None:
    old = os.umask(0)
    try:
        write_context(path, KEY, MANIFEST, some())
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert os.listdir(path.parent) == [path.name]


class Lazy(Mapping[str, torch.Tensor]):
    """Makes each tensor when it is asked for; on the second asking, another one."""

    def __init__(self, asked: int, then: torch.Tensor) -> None:
        self.left, self.then = asked, then

    def __getitem__(self, name: str) -> torch.Tensor:
        self.left -= 1
        return some()[name] if self.left >= 0 else self.then

    def __iter__(self) -> Iterator[str]:
        return iter(some())

    def __len__(self) -> int:
        return len(some())


def test_tensors_may_be_made_when_they_are_asked_for(path: Path) -> None:
    write_context(path, KEY, MANIFEST, Lazy(10, torch.zeros(1)))
    assert same(read_context(path, KEY, FINGERPRINT)[1], some())
    with pytest.raises(ValueError, match="another tensor"):
        write_context(path, KEY, MANIFEST, Lazy(8, torch.zeros(1)))


def failing(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (errno.ENOSPC, CapacityError, "SW-209"),
        (errno.EDQUOT, CapacityError, "SW-209"),
        (errno.EIO, BackendDown, "SW-508"),
        (errno.EROFS, AccessDenied, "SW-610"),
    ],
)
def test_what_could_not_be_saved_leaves_what_was_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, error: type[StepwellError], said: str
) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        failing(patched, call, code)
        with pytest.raises(error, match=said):
            write_context(saved, KEY, MANIFEST, some(2))
    assert same(read_context(saved, KEY, FINGERPRINT)[1], some())
    assert os.listdir(saved.parent) == [saved.name]
    assert set(os.listdir("/proc/self/fd")) <= fds


@pytest.mark.parametrize(
    "what",
    [
        {"tensors": {"a": torch.zeros(2, dtype=torch.complex64)}},
        {"tensors": {"a": torch.eye(2).to_sparse()}},
        {"manifest": {}},
        {"manifest": {"fingerprint": b"short"}},
    ],
)
def test_what_cannot_be_saved_is_told_before_anything_is_written(saved: Path, what: dict[str, Any]) -> None:
    before = saved.read_bytes()
    with pytest.raises(ValueError, match=r"cannot be saved|fingerprint"):
        write_context(saved, KEY, what.get("manifest", MANIFEST), what.get("tensors", some()))
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_the_disk_fails_while_reading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    failing(monkeypatch, "preadv", errno.EIO)
    refused(saved, BackendDown, "SW-508")
    assert set(os.listdir("/proc/self/fd")) <= fds


def test_links_are_not_followed(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(saved)
    refused(link, AccessDenied, "symbolic link.*SW-610")
    write_context(link, KEY, MANIFEST, some(2))
    assert not link.is_symlink()
    assert same(read_context(saved, KEY, FINGERPRINT)[1], some())
    assert same(read_context(link, KEY, FINGERPRINT)[1], some(2))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "missing", "missing/file"):
        refused(tmp_path / name, AccessDenied, "SW-610")
    refused(tmp_path / "pipe", AccessDenied, "not a regular file")
    for name in (".", "missing/file"):
        with pytest.raises(AccessDenied, match="SW-610"):
            write_context(tmp_path / name, KEY, MANIFEST, some())


def test_the_writer_makes_the_golden_file(path: Path) -> None:
    golden.write(path)
    assert path.read_bytes() == golden.FILE.read_bytes()


@pytest.mark.parametrize("version", [1, 2])
def test_the_reader_opens_the_golden_files(version: int) -> None:
    """Of both versions of frames."""
    manifest, tensors = read_context(golden.FOLDER / f"context-{version}.ctx", KEY, FINGERPRINT)
    assert manifest == golden.MANIFEST
    assert same(tensors, golden.TENSORS)
