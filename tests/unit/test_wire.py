"""The wire: whatever arrives, in whatever pieces, is a message or a ProtocolError."""

from __future__ import annotations

import itertools
import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ProtocolError
from stepwell.protocol import messages as m
from stepwell.protocol.wire import Reader, frame, from_engine, from_well

_DIGESTS = st.binary(max_size=96)
_U32, _U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
_FLOAT = st.floats(allow_nan=False)
_COUNTS = st.dictionaries(st.text(max_size=4), _U32, max_size=2)
_LIST = st.lists(_U32, max_size=8)

_ROWS = st.builds(
    m.DecisionRow,
    *(_U32, _FLOAT, _U32, _U32, _COUNTS, _COUNTS, _U32, st.text(), _FLOAT, _FLOAT, _FLOAT),
    *[_FLOAT | st.none()] * 5,
)

_NO_PLACE = st.none() | st.builds(
    m.NoPlace, blocks=_U32, places=_U32, tried=_U32, missing=st.lists(st.tuples(_U32, _U32), max_size=3)
)
_PAUSES = st.builds(m.PauseRow, kind=st.text(max_size=8), since=_FLOAT, uid=_U32, reason=st.text(max_size=8))
ENGINE = st.one_of(
    st.builds(
        m.Hello,
        protocol=_U32,
        role=st.sampled_from(["scheduler", "worker", "admin"]),
        engine=st.text(max_size=20),
        rank=_U32,
        layout=st.binary(max_size=32),
        options=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | _U32 | st.floats(allow_nan=False)),
        acknowledges=_LIST,
        groups=st.lists(
            st.builds(m.CacheGroup, st.text(max_size=9), _U32, _U32, _U32, st.text(max_size=9), _U32, _U32), max_size=3
        ),
        facts=st.binary(max_size=40),
        flags=st.lists(st.text(max_size=9), max_size=3),
    ),
    st.builds(
        m.Ask,
        ticket=_U64,
        epoch=_U64,
        order=_U32,
        digests=_DIGESTS,
        tokens=_U32,
        recall=st.text(max_size=8),
        prefix=_U64,
    ),
    st.builds(m.Look, ticket=_U64, epoch=_U64, digests=_DIGESTS),
    st.builds(m.Recall, ticket=_U64, transfer=_U64, first=_U32, count=_U32, no_place=_NO_PLACE),
    st.builds(m.Release, ticket=_U64, waited_s=_FLOAT, no_place=_NO_PLACE),
    st.builds(m.Reserve, spill=_U64, epoch=_U64, parent=_DIGESTS, digests=_DIGESTS),
    st.builds(m.Abandon, leases=_LIST),
    st.builds(m.Forget, epoch=_U64, digests=_DIGESTS),
    st.builds(m.Report, counts=st.dictionaries(st.text(max_size=5), _U32)),
    st.builds(
        m.Timings,
        steps=st.lists(st.tuples(_U32, _FLOAT, _FLOAT), max_size=3),
        copies=st.lists(st.tuples(_U32, _FLOAT), max_size=3),
    ),
    st.builds(m.DecisionsQuery, most=_U32),
    st.builds(m.Mapped, slab=_U32),
    st.builds(m.Filled, leases=_LIST, dropped=_LIST),
    st.builds(m.Recalled, transfers=_LIST),
    st.builds(m.Ping, number=_U64),
    st.just(m.StatsQuery()),
    st.builds(m.Pause, kinds=st.lists(st.text(max_size=8), max_size=3), reason=st.text(max_size=20)),
    st.builds(m.Resume, kinds=st.lists(st.text(max_size=8), max_size=3)),
    st.just(m.PausedQuery()),
    st.just(m.Reload()),
    st.just(m.Stop()),
)
WELL = st.one_of(
    st.builds(m.Welcome, session=_U32, protocol=_U32, well=st.text(max_size=9), host_bytes=_U64),
    st.builds(m.Refused, code=st.text(), what=st.text(), why=st.text(), fix=st.text()),
    st.builds(m.Ready, session=_U32),
    st.builds(m.Found, ticket=_U64, start=_U32, slots=_DIGESTS, more=st.booleans(), reason=st.text(), limit_s=_FLOAT),
    st.builds(m.Seen, ticket=_U64, here=_DIGESTS),
    st.builds(m.GiveWay, ticket=_U64, reason=st.text(max_size=8)),
    st.builds(m.Paused, rows=st.lists(_PAUSES, max_size=2), kept=st.booleans()),
    st.builds(
        m.Reloaded,
        live=st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)), max_size=2),
        restart=st.lists(st.text(max_size=5), max_size=2),
    ),
    st.builds(m.Granted, spill=_U64, leases=_LIST, slots=_DIGESTS),
    st.builds(m.SlabShared, slab=_U32, nbytes=_U64, offset=_U64, stride=_U64, slots=_U32),
    st.builds(m.SlabRetired, slab=_U32),
    st.builds(m.Pong, number=_U64),
    st.builds(m.Stats, values=st.dictionaries(st.text(), _U64 | st.text())),
    st.builds(m.Decisions, rows=st.lists(_ROWS, max_size=2)),
    st.just(m.Stopping()),
)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(st.lists(ENGINE, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_what_engines_say_arrives_in_whatever_pieces(messages: list[m.FromEngine], cuts: list[int]) -> None:
    reader = Reader(from_engine)
    data = b"".join(map(frame, messages))
    assert [got for piece in _pieces(data, cuts) for got in reader.feed(piece)] == messages


@given(st.lists(WELL, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_what_the_well_says_arrives_in_whatever_pieces(messages: list[m.FromWell], cuts: list[int]) -> None:
    reader = Reader(from_well)
    data = b"".join(map(frame, messages))
    assert [got for piece in _pieces(data, cuts) for got in reader.feed(piece)] == messages


def _read(data: bytes) -> list[m.FromEngine] | None:
    """The messages, or None for a ProtocolError. Anything else that is raised is the failure that is looked for."""
    try:
        return list(Reader(from_engine).feed(data))
    except ProtocolError as error:
        assert len(str(error)) < 2000
        return None


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    _read(data)
    assert _read(struct.pack("<I", len(data)) + data) is None or data[:1] in (
        b"\x91",
        b"\x92",
        b"\x93",
        b"\x95",
        b"\x9e",
    )


@given(ENGINE, st.data())
def test_damaged_messages(message: m.FromEngine, data: st.DataObject) -> None:
    good = bytearray(frame(message))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(4, len(good) - 1))] = data.draw(st.integers(0, 255))
    _read(bytes(good))
    short = good[4 : data.draw(st.integers(4, len(good)))]
    _read(struct.pack("<I", len(short)) + short)


NASTY = {
    "text that is no UTF-8": b"\x92\xa6Report\x81\xa2\xff\xfe\x01",
    "a tag that is no UTF-8": b"\x92\xa2\xff\xfe\x01",
    "lists in lists without end": b"\x93\xa4Ping\x01" + b"\x91" * 100_000,
    "maps in maps without end": b"\x93\xa4Ping\x01" + b"\x81\x01" * 100_000,
    "a list of four thousand million": b"\x92\xa7Abandon\xdd\xff\xff\xff\xff",
    "a map of four thousand million": b"\x92\xa6Report\xdf\xff\xff\xff\xff",
    "bytes of four thousand million": b"\x92\xa6Forget\xc6\xff\xff\xff\xff",
    "nothing": b"",
    "another type": msgspec.msgpack.encode(["Ping", "one"]),
    "no such message": msgspec.msgpack.encode(["Pang", 1]),
    "what the well says": msgspec.msgpack.encode(m.Pong(1)),
    "something behind it": msgspec.msgpack.encode(m.Ping(1)) + b"\xc0",
}


@pytest.mark.parametrize("case", NASTY)
def test_nasty_messages_are_refused(case: str) -> None:
    body = NASTY[case]
    with pytest.raises(ProtocolError) as caught:
        list(Reader(from_engine).feed(struct.pack("<I", len(body)) + body))
    assert caught.value.code == "SW-803"


def test_a_length_over_the_limit_is_refused_when_it_arrives() -> None:
    reader = Reader(from_engine)
    assert list(reader.feed(struct.pack("<I", m.MAX_MESSAGE))) == []  # the longest one allowed: waits for its bytes
    reader = Reader(from_engine)
    assert list(reader.feed(frame(m.Ping(1)) + struct.pack("<I", m.MAX_MESSAGE + 1)[:3])) == [m.Ping(1)]
    with pytest.raises(ProtocolError) as caught:
        list(reader.feed(struct.pack("<I", m.MAX_MESSAGE + 1)[3:]))
    assert caught.value.code == "SW-802"


def test_the_largest_ask_and_look_fit() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    digests = random.Random(seed).randbytes(32 * m.MAX_DIGESTS)
    for message in (m.Ask(2**64 - 1, 2**64 - 1, 2**63, digests), m.Look(2**64 - 1, 2**64 - 1, digests)):
        assert list(Reader(from_engine).feed(frame(message))) == [message]


def test_messages_before_a_broken_one_are_delivered() -> None:
    reader = Reader(from_engine)
    feed = reader.feed(frame(m.Ping(1)) + struct.pack("<I", 1) + b"\xc1")
    assert next(feed) == m.Ping(1)
    with pytest.raises(ProtocolError):
        next(feed)


def test_what_the_version_before_says_and_hears_of_giving_way_is_understood() -> None:
    """A reason is a field more, which it does not send and leaves out."""
    old = msgspec.msgpack.encode(["GiveWay", 7])
    assert msgspec.msgpack.decode(old, type=m.FromWell) == m.GiveWay(7)
    new = msgspec.msgpack.encode(m.GiveWay(7, "paused"))
    assert msgspec.msgpack.decode(new, type=_OldGiveWay) == _OldGiveWay(7)


class _OldGiveWay(msgspec.Struct, frozen=True, array_like=True, tag="GiveWay"):
    ticket: int
