"""Frames in places that are others': of other blocks, shards, tenants, key epochs, namespaces, segments, positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from lab.trust.format.made import NAMESPACES, ORIGINS, Block, Maker, content, segment
from lab.trust.format.pieces import Tally, Turn
from stepwell.block.frame import CHUNK, TAG
from stepwell.block.layout import PAGE
from stepwell.io.memory import Bytes
from stepwell.tiers.base import Place, Reading

NBYTES, SHARDS = 1000, 2
_BLOCKS, _SEGMENTS, _ORDINALS = 2, 2, 2
_AT = 40  # of a chunk: where its last bytes and its tag are taken apart


@dataclass(frozen=True, slots=True)
class _Lies:
    """One frame, and what it was made as."""

    block: Block
    shard: int
    segment: bytes
    sealed: bool
    frame: Bytes


def every_pair(turn: Turn, sealed: bool, first: int, step: int) -> Tally:
    """Each frame is opened in the place of each other one. The wells that look are sealed, or plain: then only what is
    not made to deceive is told apart, and all of it is here."""
    makers = {kind: Maker(NBYTES, SHARDS, sealed=kind) for kind in (True, False)}
    frames = list(_frames(makers))
    maker, tally = makers[sealed], Tally()
    for wanted in frames[first::step]:
        if wanted.sealed is not sealed:
            continue
        at = {f.shard: f.frame for f in frames if (f.block, f.segment) == (wanted.block, wanted.segment) and f.sealed}
        for found in frames:
            parts = [at[0]] * wanted.shard + [found.frame]
            answer = maker.open(wanted.block, parts, wanted.segment)
            tally.cases += 1
            if answer is Reading.GOOD:
                tally.right += 1
                got = maker.slot(wanted.shard)
                if not (got == content(wanted.block, wanted.shard, NBYTES)).all():
                    tally.wrong(f"{_name(found)} opened as {_name(wanted)}")
                if (found.block, found.shard, found.segment) != (wanted.block, wanted.shard, wanted.segment):
                    tally.wrong(f"{_name(found)} was believed to be {_name(wanted)}")
                if sealed and not found.sealed:
                    tally.wrong(f"{_name(found)} is plain, and opened where frames are sealed")
            elif not maker.wiped():
                tally.wrong(f"{_name(found)} left something in the place of {_name(wanted)}")
        if turn.over:
            break
    return tally


def every_splice(turn: Turn, sealed: bool) -> Tally:
    """Headers, payloads, tags and chunks of several frames are put together."""
    tally = Tally()
    maker = Maker(NBYTES, SHARDS, sealed=sealed)
    of_one = [f for f in _frames({sealed: maker}) if f.shard == 0]
    end = PAGE + NBYTES
    for wanted, other in permutations(of_one, 2):
        for cut in (PAGE, PAGE + _AT, end, end + TAG - _AT % TAG):
            mixed = wanted.frame.copy()
            mixed[cut:] = other.frame[cut:]
            _open(tally, maker, wanted.block, [mixed], wanted.segment, f"{turn.name}: {_name(wanted)} until {cut}")
        if turn.over:
            return tally
    large = Maker(3 * CHUNK, sealed=sealed)
    place = Place(segment(0), 0)
    frames = [np.concatenate(large.frames(Block(number=n), place)) for n in range(2)]
    again = np.concatenate(large.frames(Block(number=0), Place(segment(0), 3)))
    for order in product(range(3), repeat=3):
        for first, second in product(range(3), repeat=2):
            sources = [(frames[0], frames[1], again)[n] for n in (0, first, second)]
            mixed = frames[0].copy()
            for chunk, (source, taken) in enumerate(zip(sources, order, strict=True)):
                _chunk(mixed, chunk)[:] = _chunk(source, taken)
            _whole(tally, large, mixed, place.segment, f"{turn.name}: chunks {order} of {(0, first, second)}")
    return tally


def _frames(makers: dict[bool, Maker]) -> Iterator[_Lies]:
    for kind, maker in makers.items():
        for origin, space, number in product(range(len(ORIGINS)), range(len(NAMESPACES)), range(_BLOCKS)):
            block = Block(origin, space, number)
            for of, ordinal in product(range(_SEGMENTS), range(_ORDINALS)):
                parts = maker.frames(block, Place(segment(of), 100 * ordinal))
                for shard, frame in enumerate(parts):
                    yield _Lies(block, shard, segment(of), kind, frame)


def _name(lies: _Lies) -> str:
    return f"{lies.block}, shard {lies.shard}, segment {lies.segment.hex()[:8]}, {'sealed' if lies.sealed else 'plain'}"


def _open(tally: Tally, maker: Maker, block: Block, parts: list[Bytes], segment: bytes, what: str) -> None:
    """Its first shard: a miss that leaves nothing behind, or the right bytes."""
    tally.cases += 1
    if maker.open(block, parts, segment) is Reading.GOOD:
        tally.right += 1
        if not (maker.slot(0) == content(block, 0, maker.nbytes)).all():
            tally.wrong(f"{what}: other bytes")
    elif not maker.wiped():
        tally.wrong(f"{what}: left something in a slot")


def _chunk(frame: Bytes, number: int) -> Bytes:
    """A chunk and its tag."""
    start = PAGE + number * (CHUNK + TAG)
    return frame[start : start + CHUNK + TAG]


def _whole(tally: Tally, maker: Maker, frame: Bytes, segment: bytes, what: str) -> None:
    ends = np.cumsum(maker.incoming(Block(number=0)).parts)[:-1]
    _open(tally, maker, Block(number=0), list(np.split(frame, ends)), segment, what)
