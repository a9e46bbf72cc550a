"""A prefilled context as one file: sealed, bound to the model that made it, and whole or absent.

The content is the caller's: a manifest (a dict that msgpack can hold; tuples are read back as lists) and tensors by
name, which are read back bit for bit. A user who can write the file can destroy it, or put an earlier one of the same
model in its place, but cannot change its content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepwell.block.frame import FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import Opened, Opener, Sealer, SegmentKey
from stepwell.errors import AccessDenied, BackendDown, CapacityError, IdentityMismatch, IntegrityError, StepwellError
from stepwell.io.memory import Bytes
from stepwell.longctx.saved import form
from stepwell.longctx.store.trouble import FULL
from stepwell.vault.memory import KEY_BYTES

FINGERPRINT_BYTES = 32

_KEEP = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_context(
    path: Path,
    key: bytes | memoryview,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    random: Callable[[int], bytes] = secrets.token_bytes,
    now: Callable[[], float] = time.time,
) -> None:
    """Saves these under `path`, 0600, in place of what was there; on disk when this returns. `key`: 32 bytes.
    `manifest["fingerprint"]`: of the model, 32 bytes.

    Each tensor is asked for twice, so `tensors` may make them when they are asked for and need not hold all of them at
    a time. They may be on any device. Until the file is whole it has another name, beside it, ending in `.new`, which
    only a killed process leaves behind. Raises CapacityError SW-209 (the disk is full), AccessDenied SW-610 (no file
    can be made there), BackendDown SW-508 (the disk failed); ValueError for what cannot be saved. `path` is then as it
    was before.
    """
    path = Path(path)
    described = form.by_name(tensors)
    context = {name: value for name, value in manifest.items() if name != "fingerprint"}
    whole = form.Manifest(_fingerprint(manifest.get("fingerprint")), described, context)
    packed = np.frombuffer(whole.pack(), np.uint8)
    if len(packed) > form.PIECE:
        raise ValueError(f"a manifest of {len(packed)} bytes")
    file_id = random(16)
    sealing = form.file_key(_key(key, path), file_id)
    headers = form.Headers(file_id, whole.frames, sealing.commitment, int(now()), random(4))
    with _failing(path, "written"), _replacing(path) as fd:
        _append(fd, headers.next(len(packed)), sealing, packed)
        for one in described:
            tensor = tensors[one.name]
            if form.Described.of(one.name, tensor) != one:
                raise ValueError(f"{one.name} is another tensor than it was a moment ago")
            raw = form.content(tensor)
            for start, end in one.pieces:
                _append(fd, headers.next(end - start), sealing, raw[start:end])


class ContextReader:
    """A saved context whose tensors are read one by one, each of them whole and checked. Not thread-safe.

    Raises AccessDenied SW-610 (cannot be opened, no regular file, sealed with another key), IdentityMismatch SW-407
    (of another model, or of another version of the format), IntegrityError SW-306 (no saved context, cut, extended,
    changed or put together of parts), BackendDown SW-508 (the disk failed).
    """

    def __init__(self, path: Path, key: bytes | memoryview, expected_fingerprint: bytes) -> None:
        self._path = Path(path)
        self._fd = _opened(self._path)
        try:
            with _failing(self._path, "read"):
                self._begin(_key(key, self._path), _fingerprint(expected_fingerprint))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of the file."""
        return tuple(self._places)

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this name. KeyError if there is none."""
        described, ordinal, offset = self._places[name]
        tensor = described.empty()
        raw = form.content(tensor)
        with _failing(self._path, "read"):
            for start, end in described.pieces:
                offset += self._open(ordinal, offset, raw[start:end])
                ordinal += 1
        return tensor

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self, key: bytes | memoryview, fingerprint: bytes) -> None:
        size = os.fstat(self._fd).st_size
        header = FrameHeader.parse(_read(self._fd, 0, PAGE).tobytes())
        if header is None or (version := form.version_of(header)) is None or header.payload > form.PIECE:
            raise _damaged(self._path, "its beginning is not that of a saved context")
        if version != form.VERSION:
            raise _other(self._path, f"it has version {version} of the format, and this release reads {form.VERSION}")
        self._key = form.file_key(key, header.segment)
        if header.commitment != self._key.commitment:
            raise _denied(self._path, "it was sealed with another key")
        self._id, self._frames = header.segment, form.frames_of(header)
        packed = np.empty(header.payload, np.uint8)
        offset, ordinal = self._open(0, 0, packed), 1
        try:
            whole = form.Manifest.parse(packed)
        except (ValueError, RecursionError) as error:
            raise _damaged(self._path, "its manifest is none") from error
        if whole.fingerprint != fingerprint:
            raise _other(self._path, "the model that it was made with has other weights or another configuration")
        if (whole.frames, whole.file_bytes(len(packed))) != (self._frames, size):
            raise _damaged(self._path, "it is shorter or longer than its manifest says")
        self.manifest: dict[str, Any] = {"fingerprint": whole.fingerprint, **whole.context}
        self._places: dict[str, tuple[form.Described, int, int]] = {}
        for one in whole.tensors:
            self._places[one.name] = one, ordinal, offset
            for start, end in one.pieces:
                offset += frame_bytes(end - start)
                ordinal += 1

    def _open(self, ordinal: int, offset: int, into: Bytes) -> int:
        """Opens the frame at `offset`; its bytes in the file."""
        opener = Opener(form.expected(self._id, ordinal, self._frames, len(into)), self._key, sealed=True, now=0)
        at = offset
        for part, nbytes in enumerate(opener.parts):
            if opener.open(part, _read(self._fd, at, nbytes), into) is not Opened.GOOD:
                raise _damaged(self._path, f"frame {ordinal} of {self._frames} failed its check")
            at += nbytes
        return at - offset


def _append(fd: int, header: FrameHeader, key: SegmentKey, payload: Bytes) -> None:
    sealer = Sealer(header, key)
    for part, nbytes in enumerate(sealer.parts):
        sealed = np.empty(nbytes, np.uint8)
        sealer.make(part, payload, sealed)
        view = sealed.data
        while view:
            view = view[os.write(fd, view) :]


def _read(fd: int, offset: int, nbytes: int) -> Bytes:
    """Reads bytes; zeros behind the end of the file, which pass no check."""
    into = np.zeros(nbytes, np.uint8)
    view, done = into.data, 0
    while done < nbytes and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return into


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A new file that takes the place of `path` if the body ends well, and is gone if it does not."""
    name, temporary = path.name, f"{path.name}.{secrets.token_hex(8)}.new"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _KEEP, 0o600, dir_fd=folder)
        try:
            try:
                yield fd
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def _opened(path: Path) -> int:
    with _failing(path, "read"):
        fd = os.open(path, os.O_RDONLY | _KEEP)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise _denied(path, "it is not a regular file")


@contextlib.contextmanager
def _failing(path: Path, doing: str) -> Iterator[None]:
    """Turns the system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise _failed(path, error, doing) from error


def _failed(path: Path, error: OSError, doing: str) -> StepwellError:
    why = error.strerror or str(error)
    if error.errno in FULL:
        return CapacityError(
            "SW-209",
            what=f"the context cannot be saved as {path}",
            why=why,
            fix="make room there, or save it in another place; nothing was saved",
        )
    if error.errno == errno.EIO:
        return BackendDown(
            "SW-508",
            what=f"the saved context {path} cannot be {doing}",
            why=why,
            fix="look at the disk's own log, or use another disk",
        )
    return _denied(path, "it is a symbolic link" if error.errno == errno.ELOOP else why)


def _key(key: bytes | memoryview, path: Path) -> bytes | memoryview:
    if len(key) != KEY_BYTES:
        raise _denied(path, f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _fingerprint(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != FINGERPRINT_BYTES:
        raise ValueError(f"a model's fingerprint is {FINGERPRINT_BYTES} bytes")
    return value


def _damaged(path: Path, why: str) -> IntegrityError:
    return IntegrityError(
        "SW-306", what=f"the saved context {path} is damaged", why=why, fix="make it again from the document"
    )


def _other(path: Path, why: str) -> IdentityMismatch:
    return IdentityMismatch(
        "SW-407",
        what=f"the saved context {path} is not for this model",
        why=why,
        fix="open it with the model and the release that it was made with, or make it again from the document",
    )


def _denied(path: Path, why: str) -> AccessDenied:
    return AccessDenied(
        "SW-610",
        what=f"the saved context {path} cannot be opened",
        why=why,
        fix="name a regular file that you may use, and the key that sealed it (longctx.key in stepwell's home)",
    )
