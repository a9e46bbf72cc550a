"""Bits of frames that have changed on their way, and frames that were cut: what opens is what was written."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from lab.trust.format.images import MemoryFile
from lab.trust.format.made import NAMESPACES, ORIGINS, Block, Maker, content, segment
from lab.trust.format.pieces import Tally, Turn
from stepwell.block.frame import CHUNK
from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.io.memory import Bytes
from stepwell.io.staging import Staging
from stepwell.tiers.base import Place, Reading
from stepwell.tiers.disk.stream import read_in

_CRC = struct.Struct("<I")


def checked(page: Bytes) -> None:
    """Gives a page of ours the checksum that it should have."""
    page[-4:] = np.frombuffer(_CRC.pack(zlib.crc32(page[:-4].data)), np.uint8)


def every_bit(turn: Turn, number: int) -> Tally:
    """Of one frame of a random block, and again, with the right checksum, of its header."""
    dice = turn.dice()
    nbytes = dice.choice((1, 2048, dice.randint(2, 2047)))
    shards = dice.randint(1, 3)
    maker = Maker(nbytes, shards, sealed=number % 2 == 0)
    block = Block(dice.randrange(len(ORIGINS)), dice.randrange(len(NAMESPACES)), number)
    place = Place(segment(number), dice.randrange(1 << 32))
    parts, shard = maker.frames(block, place), dice.randrange(shards)
    flips = _Flips(turn, maker, block, parts, shard, place.segment)
    for bit in range(8 * len(parts[shard])):
        flips.one(bit)
        if bit % 65536 == 0 and turn.over:
            return flips.tally
    for bit in range(8 * (PAGE - 4)):
        flips.one(bit, checksum=True)
    if maker.open(block, parts, place.segment) is not Reading.GOOD or not maker.right(block):
        flips.tally.wrong(f"{turn.name}: what was not changed does not open")
    return flips.tally


def some_bits(turn: Turn, number: int, times: int) -> Tally:
    """One bit at a time of a large frame, of several chunks."""
    dice = turn.dice()
    maker = Maker(dice.randint(CHUNK + 1, 3 * CHUNK), sealed=number % 2 == 0)
    block, place = Block(number=number), Place(segment(number), 0)
    whole = np.concatenate(maker.frames(block, place))
    tally = Tally()
    for _ in range(times):
        bit = dice.randrange(8 * len(whole))
        whole[bit // 8] ^= 1 << bit % 8
        answer = _read(maker, block, MemoryFile(whole), place.segment)
        _judge(tally, maker, block, answer, f"{turn.name}: bit {bit}")
        whole[bit // 8] ^= 1 << bit % 8
        if turn.over:
            break
    return tally


def every_length(turn: Turn, number: int) -> Tally:
    """A block's frames at the end of a file that has any number of bytes less, or more; or zeros in their place."""
    maker = Maker(turn.dice().choice((17, 2048)), 2, sealed=number % 2 == 0)
    block, place = Block(number=number), Place(segment(number), 3)
    whole = np.concatenate(maker.frames(block, place))
    longer = np.concatenate([whole, np.full(PAGE, 0xEE, np.uint8)])
    tally = Tally()
    for length in range(len(longer) + 1):
        answer = _read(maker, block, MemoryFile(longer[:length]), place.segment)
        _judge(tally, maker, block, answer, f"{turn.name}: {length} bytes")
        if length < len(whole):
            torn = whole.copy()
            torn[length:] = 0
            answer = _read(maker, block, MemoryFile(torn), place.segment)
            _judge(tally, maker, block, answer, f"{turn.name}: zeros from {length} on")
        if length % 1024 == 0 and turn.over:
            break
    return tally


class _Flips:
    """Opens a shard's frame with one bit changed; the shards before it are as they were."""

    def __init__(self, turn: Turn, maker: Maker, block: Block, parts: list[Bytes], shard: int, segment: bytes) -> None:
        self.tally = Tally()
        self._turn, self._maker, self._block = turn, maker, block
        self._frame, self._shard, self._segment = parts[shard], shard, segment
        self._incoming = maker.incoming(block)
        for part in range(shard):
            self._incoming.open(part, parts[part], segment)
        self._page = parts[shard][:PAGE].copy()

    def one(self, bit: int, *, checksum: bool = False) -> None:
        frame, maker = self._frame, self._maker
        frame[bit >> 3] ^= 1 << (bit & 7)
        if checksum:
            checked(frame[:PAGE])
        answer = self._incoming.open(self._shard, frame, self._segment)
        frame[bit >> 3] ^= 1 << (bit & 7)
        if checksum:
            frame[PAGE - 4 : PAGE] = self._page[-4:]
        self.tally.cases += 1
        if answer is Reading.GOOD:
            self.tally.right += 1
            if not (maker.slot(self._shard) == content(self._block, self._shard, maker.nbytes)).all():
                self.tally.wrong(f"{self._turn.name}: bit {bit}: other bytes")
            return
        self._incoming.fail()
        if not maker.wiped():
            self.tally.wrong(f"{self._turn.name}: bit {bit} left something in a slot")


_staging = Staging(1)


def _read(maker: Maker, block: Block, file: File, segment: bytes) -> Reading:
    (answer,) = read_in(file, 0, [maker.incoming(block)], segment, _staging)
    return answer


def _judge(tally: Tally, maker: Maker, block: Block, answer: Reading, what: str) -> None:
    """A miss that leaves nothing behind, or the right bytes."""
    tally.cases += 1
    if answer is Reading.GOOD:
        tally.right += 1
        if not maker.right(block):
            tally.wrong(f"{what}: other bytes")
    elif not maker.wiped():
        tally.wrong(f"{what}: left something in a slot")
