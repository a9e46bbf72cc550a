"""Framing: a 4-byte little-endian length, then one msgpack message; descriptors ride with the first byte.

Pure functions and one incremental reader; sockets belong to the callers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from stepwell.errors import ProtocolError
from stepwell.protocol.messages import MAX_MESSAGE, FromEngine, FromWell, Message

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
from_well: msgspec.msgpack.Decoder[FromWell] = msgspec.msgpack.Decoder(FromWell)

T = TypeVar("T")

# What msgspec raises for bytes that are not ours; for broken text and endless nesting it has no class of its own.
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)


def frame(message: Message) -> bytes:
    """The message as it goes over the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Reader(Generic[T]):
    """Turns received bytes into messages; raises ProtocolError on anything that is not one. `most`: bytes of a message,
    which may change between two."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], most: int = MAX_MESSAGE) -> None:
        self.most = most
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def waiting(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[T]:
        """Yields the messages completed by `data`: take them all before the next call. A message that claims more than
        `most` bytes is refused when its length arrives."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > self.most:
                raise ProtocolError(
                    "SW-802",
                    what=f"message of {length} bytes",
                    why=f"the limit is {self.most}",
                    fix="use the same stepwell version for engine and well",
                )
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            body = bytes(self._buffer[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
            try:
                message = self._decoder.decode(body)
            except _UNDECODABLE as error:
                raise ProtocolError(
                    "SW-803",
                    what="a message that is not one of ours",
                    why=_reason(error),
                    fix="use the same stepwell version for engine and well",
                ) from None
            yield message
        del self._buffer[:at]


def _reason(error: Exception) -> str:
    """What the decoder says of types and places. Never of values: they are whatever a peer has sent, of any length, and
    this goes into the log."""
    text = str(error)
    return text if text.startswith(("Expected `", "Input data was")) else "it is of no kind that is known here"
