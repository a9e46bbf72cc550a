"""Messages that nobody sends, both ways: taken as what they are, or refused in words."""

from __future__ import annotations

import random
import struct
import types
import typing
from functools import lru_cache
from typing import Any

import msgspec

from lab.trust.format.gauge import Gauge
from lab.trust.format.pieces import Tally, Turn
from stepwell.block.layout import MiB
from stepwell.errors import ProtocolError
from stepwell.protocol import wire
from stepwell.protocol.messages import MAX_LISTED, MAX_MESSAGE, FromEngine, FromWell, Message, overlong

_NUMBERS = (0, 1, -1, 2, 7, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
_TEXTS = ("", "scheduler", "worker", "admin", "engine", "host", "disk", "x" * 200, "\n\x00\x1b[2J", "\U0010ffff" * 40)
_LENGTHS = (0, 1, 16, 31, 32, 33, 64, 1024)
_LONG = 0.01  # so often a list is as long as it may be, or longer
_CLAIMS = [bytes([code]) + struct.pack(">I", n) for code in (0xDB, 0xC6, 0xDD, 0xDF, 0xC9) for n in (2**20, 2**32 - 1)]
"""Strings, bytes, arrays, tables and extensions of very many elements that do not come."""


@lru_cache
def kinds(union: Any) -> tuple[type[Message], ...]:
    return typing.get_args(union)


@lru_cache
def _fields(kind: type[Message]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


def message(dice: random.Random, kind: type[Message]) -> Message:
    """One with the right types and odd values."""
    return kind(**{name: _value(dice, of) for name, of in _fields(kind)})


def _value(dice: random.Random, of: Any) -> Any:
    origin = typing.get_origin(of)
    if origin is typing.Annotated:  # with a bound, which may be kept or not
        return _value(dice, of.__origin__)
    if of is int:
        return dice.choice(_NUMBERS) if dice.random() < 0.5 else dice.randrange(12)
    if of is str:
        return dice.choice(_TEXTS)
    if of is bytes:
        return dice.randbytes(dice.choice(_LENGTHS))
    if of is bool:
        return dice.random() < 0.5
    if of is float:
        return dice.choice((0.0, -1.0, 1e308, float("inf"), float("nan"), 0.25))
    if origin is list:
        (element,) = typing.get_args(of)
        if element is int and dice.random() < _LONG:
            return [_value(dice, element)] * dice.choice((MAX_LISTED, MAX_LISTED + 1, 10_000))
        return [_value(dice, element) for _ in range(dice.choice((0, 1, 2, 40)))]
    if origin is tuple:
        return tuple(_value(dice, element) for element in typing.get_args(of))
    if origin is dict:
        key, element = typing.get_args(of)
        return {_value(dice, key): _value(dice, element) for _ in range(dice.choice((0, 1, 3)))}
    if origin is types.UnionType or origin is typing.Union:
        return _value(dice, dice.choice(typing.get_args(of)))
    return None if of is types.NoneType else message(dice, of)


def mangled(dice: random.Random, body: bytes) -> bytes:
    made = bytearray(body)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(made) + 1)
        kind = dice.randrange(7)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            made[at:at] = dice.choice(_CLAIMS)
        elif kind == 2:
            made[at : at + 5] = dice.choice(_CLAIMS)
        elif kind == 3:
            del made[at:]
        elif kind == 4:
            made[at : at + dice.randrange(4)] = dice.randbytes(dice.randrange(6))
        elif kind == 5:
            made[at:at] = dice.choice((b"\x91", b"\x81", b"\x92\x91")) * dice.choice((3, 5000))
        else:
            made[at:at] = made[: dice.randrange(len(made) + 1)]
    return bytes(made)


def stream(dice: random.Random, union: Any) -> bytes:
    """Some messages one after the other, some of them, or their lengths, as nobody sends them."""
    made = []
    for _ in range(dice.randint(1, 3)):
        data = wire.frame(message(dice, dice.choice(kinds(union))))
        kind = dice.random()
        if kind < 0.6:
            body = mangled(dice, data[4:])
            data = len(body).to_bytes(4, "little") + body
        elif kind < 0.7:
            data = dice.choice((0, 1, MAX_MESSAGE, MAX_MESSAGE + 1, 2**32 - 1)).to_bytes(4, "little") + data[4:]
        elif kind < 0.8:
            data = dice.randbytes(dice.randrange(64))
        made.append(data)
    return b"".join(made)


def streams(turn: Turn, number: int, times: int) -> Tally:
    """Of an engine to a well, or of a well to an engine: messages, then nothing or a ProtocolError. They come in pieces
    of any size."""
    dice, tally = turn.dice(), Tally()
    union, decoder = ((FromEngine, wire.from_engine), (FromWell, wire.from_well))[number % 2]
    gauge = Gauge(tally, MiB)
    for case in range(times):
        data = stream(dice, union)
        with gauge.case(f"{turn.name}: case {case}: {data[:200].hex()}", len(data)):
            _feed(dice, tally, wire.Reader(decoder), data, f"{turn.name}: case {case}: {data[:200].hex()}")
        if case % 1024 == 0 and turn.over:
            break
    gauge.end(turn.name)
    return tally


def _feed(dice: random.Random, tally: Tally, reader: wire.Reader[Any], data: bytes, what: str) -> None:
    at = 0
    try:
        while at < len(data):
            some = dice.choice((1, 5, 64, len(data)))
            for taken in reader.feed(data[at : at + some]):
                tally.right += 1
                if not isinstance(taken, Message):
                    tally.wrong(f"{what}: {type(taken).__name__} came out")
                elif isinstance(taken, FromEngine) and overlong(taken):
                    tally.wrong(f"{what}: {type(taken).__name__} came out, of a length that no engine sends")
                wire.frame(taken)
            at += some
    except ProtocolError:
        pass
