"""The bytes of a saved context, drawn in docs/design/format.md and guarded by a golden file.

    frame 0: manifest | frames of the first tensor | frames of the second | ...

Frames are those of `block.frame`, sealed. Each carries the file's random id, its ordinal and how many there are, so
that none passes for another one, or for one of another file. Pure: nothing is read or written here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from stepwell.block.frame import AES_256_GCM, FrameHeader, frame_bytes, frame_parts
from stepwell.codecs.seal import ExpectedFrame, SegmentKey
from stepwell.io.memory import Bytes
from stepwell.vault.memory import cells

VERSION = 1
PIECE = 64 << 20
"""Bytes of a tensor in one frame, at most; of a manifest too."""

_MAGIC = b"stepwell ctx"
_WHAT = struct.Struct("<12sI")
_WHICH = struct.Struct("<QQ16x")
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the file: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Described:
        """Raises ValueError for a tensor that cannot be saved."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"{name}: a tensor of {tensor.dtype}, {tensor.layout} cannot be saved")
        return cls(name, dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        total = _DTYPES[self.dtype].itemsize
        for length in self.shape:
            total *= length
        return total

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        """Half-open ranges of bytes, one for each frame; none for an empty tensor."""
        nbytes = self.nbytes
        return ((start, min(start + PIECE, nbytes)) for start in range(0, nbytes, PIECE))

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype])


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest of a saved context. `fingerprint`: of the model, 32 bytes. `context`: the caller's own data."""

    fingerprint: bytes
    tensors: tuple[Described, ...]
    context: dict[str, Any]

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def parse(cls, packed: Bytes) -> Manifest:
        """Raises ValueError for what no writer writes."""
        manifest = msgspec.msgpack.decode(packed.data, type=cls)
        for tensor in manifest.tensors:
            if tensor.dtype not in _DTYPES or any(length < 0 for length in tensor.shape):
                raise ValueError(f"{tensor.name[:80]} is no tensor")
        return manifest

    @property
    def frames(self) -> int:
        return 1 + sum(len(list(tensor.pieces)) for tensor in self.tensors)

    def file_bytes(self, packed: int) -> int:
        """Bytes of the whole file; `packed`: those of this manifest."""
        return frame_bytes(packed) + sum(
            frame_bytes(end - start) for tensor in self.tensors for start, end in tensor.pieces
        )


class Headers:
    """The headers of a file's frames, one after the other, as the writer makes them."""

    def __init__(self, file_id: bytes, frames: int, commitment: bytes, created: int, salt: bytes) -> None:
        """`file_id` 16 bytes, `salt` 4, both random; `created` in Unix seconds."""
        self._id, self._frames, self._commitment = file_id, frames, commitment
        self._created, self._salt = created, salt
        self._ordinal = self._parts = 0

    def next(self, payload: int) -> FrameHeader:
        nonce = self._salt + self._parts.to_bytes(8, "big")
        header = FrameHeader(
            AES_256_GCM, self._id, self._commitment, which(self._ordinal, self._frames), what(), nonce,
            0, 1, payload, payload, self._created,
        )  # fmt: skip
        self._ordinal += 1
        self._parts += len(frame_parts(payload))  # each has a nonce of its own
        return header


def expected(file_id: bytes, ordinal: int, frames: int, payload: int) -> ExpectedFrame:
    """Header fields that a frame at this position must have."""
    return ExpectedFrame(file_id, which(ordinal, frames), what(), 0, 1, payload)


def which(ordinal: int, frames: int) -> bytes:
    """Number of a frame and of all frames, in the place of a block id."""
    return _WHICH.pack(ordinal, frames)


def frames_of(header: FrameHeader) -> int:
    """Number of frames of the file, by the header of one of them."""
    _, frames = _WHICH.unpack(header.block)
    return int(frames)


def what() -> bytes:
    """Marker of a saved context with the version of its format, in the place of a namespace tag."""
    return _WHAT.pack(_MAGIC, VERSION)


def version_of(header: FrameHeader) -> int | None:
    """The version of the saved context that begins with this; None if it is another kind of frame."""
    magic, version = _WHAT.unpack(header.namespace)
    return int(version) if magic == _MAGIC else None


def file_key(key: bytes | memoryview, file_id: bytes) -> SegmentKey:
    """The key of one file and the commitment to it."""
    return SegmentKey(
        cells.take(_derived(key, b"stepwell context v1" + file_id)),
        _derived(key, b"stepwell context commit v1" + file_id),
    )


def content(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes in memory order, little-endian, on the host; copied only if they are not contiguous there."""
    flat: Bytes = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return flat


def by_name(tensors: Mapping[str, torch.Tensor]) -> tuple[Described, ...]:
    return tuple(Described.of(name, tensors[name]) for name in tensors)


def _derived(key: bytes | memoryview, info: bytes) -> bytes:
    return HKDFExpand(hashes.SHA256(), 32, info).derive(key)
