"""Messages between a model's process and the one that scores near the data: msgpack for fields, raw bytes for tensors.
Both ends are of one installation and one run, so there are no versions.

    | 4 bytes: length of the head | head: message, dtype and shape of each tensor | bytes of the tensors |
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from stepwell.longctx.near.kinds import KindDescription
from stepwell.longctx.shape import PageShape

_LENGTH = struct.Struct("<I")
_AT_ONCE = 1 << 20  # a timeout is for so many bytes, not for all of them


class NearMessage(msgspec.Struct, frozen=True, tag=True):
    """A message; its tensors follow it."""


class NearHello(NearMessage, frozen=True):
    """The first of all. `paths`: where kinds of indexes may be imported from."""

    host: int | str | None
    disk: str | list[str] | None
    threads: int
    paths: list[str]


class Open(NearMessage, frozen=True):
    """Makes the store for pages of so many bytes."""

    page_bytes: int


class Put(NearMessage, frozen=True):
    """Tensors: pages. Answer: places."""

    page_bytes: int


class Get(NearMessage, frozen=True):
    """Tensors: places. Answer: pages."""

    page_bytes: int


class Retain(NearMessage, frozen=True):
    """Tensors: places."""

    page_bytes: int


class Free(NearMessage, frozen=True):
    """Tensors: places."""

    page_bytes: int


class Usage(NearMessage, frozen=True):
    """Answer: bytes in use in each tier."""

    page_bytes: int


class Close(NearMessage, frozen=True):
    """Gives everything of this store back."""

    page_bytes: int


class Make(NearMessage, frozen=True):
    """Makes the key index of a layer, in place of one that it had."""

    layer: int
    kind: KindDescription
    shape: PageShape


class Add(NearMessage, frozen=True):
    """Tensors: keys. Answer, as of the two below: bytes that the index takes."""

    layer: int


class Best(NearMessage, frozen=True):
    """The best pages for a query. Tensors: query, hot_lse; where `visible` counts tokens, as bits which of them are
    no padding and which pages come first; -1: there is no padding, None: as in the request before. Answer: pages [L, K]
    int32, logarithms of their masses [L, H, G, K] float16, mass of all others and log-sum-exp of everything, [L, H, G]
    float32 each."""

    layer: int
    count: int
    scale: float
    softcap: float | None
    tokens: int
    visible: int | None


class Crop(NearMessage, frozen=True):
    """Keeps so many pages."""

    layer: int
    pages: int


class SelectRows(NearMessage, frozen=True):
    """Tensors: lanes."""

    layer: int


class RequestDone(NearMessage, frozen=True):
    """Tensors: what was asked for. `usage`: bytes, where these were asked for."""

    usage: dict[str, int] = {}


class RequestRefused(NearMessage, frozen=True):
    """A StepwellError."""

    code: str
    what: str
    why: str
    fix: str


class Wrong(NearMessage, frozen=True):
    """A ValueError: the caller's mistake."""

    why: str


class Broken(NearMessage, frozen=True):
    """Anything else, after which the process can no longer be used."""

    why: str


Request = NearHello | Open | Put | Get | Retain | Free | Usage | Close | Make | Add | Best | Crop | SelectRows
Answer = RequestDone | RequestRefused | Wrong | Broken


class MessageHead(msgspec.Struct, frozen=True):
    message: Request | Answer
    tensors: list[tuple[str, tuple[int, ...]]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MessageHead).decode


def send(line: socket.socket, message: Request | Answer, tensors: Sequence[torch.Tensor] = ()) -> int:
    """Sends a message; returns its size in bytes. Raises OSError if the line is broken or is not read within its
    timeout."""
    held = [tensor.detach().cpu().contiguous() for tensor in tensors]
    head = _encode(MessageHead(message, [(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in held]))
    line.sendall(_LENGTH.pack(len(head)) + head)
    for tensor in held:
        raw = _raw(tensor)
        for start in range(0, len(raw), _AT_ONCE):
            line.sendall(raw[start : start + _AT_ONCE])
    return _LENGTH.size + len(head) + sum(tensor.nbytes for tensor in held)


def receive(line: socket.socket, *, pinned: bool = False) -> tuple[Request | Answer, list[torch.Tensor], int]:
    """A message, its tensors, and how many bytes that were. Raises EOFError where the other end is closed, OSError as
    `send` does."""
    length = bytearray(_LENGTH.size)
    _fill(line, memoryview(length))
    packed = bytearray(_LENGTH.unpack(length)[0])
    _fill(line, memoryview(packed))
    head = _decode(packed)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=pinned) for dtype, shape in head.tensors]
    for tensor in tensors:
        _fill(line, _raw(tensor))
    return head.message, tensors, len(length) + len(packed) + sum(tensor.nbytes for tensor in tensors)


def packed(visible: torch.Tensor) -> torch.Tensor:
    """[L, N] bool to [L, N / 8] uint8."""
    return torch.from_numpy(np.packbits(visible.cpu().numpy(), axis=1))


def unpacked(bits: torch.Tensor, count: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=count)).bool()


def _raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _fill(line: socket.socket, into: memoryview) -> None:
    while into:
        count = line.recv_into(into)
        if not count:
            raise EOFError("the other end is closed")
        into = into[count:]
