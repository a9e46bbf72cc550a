"""Every other number of a version, in heads, trailers, frames and keyrings: counted and kept, never deleted, never
guessed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec
import numpy as np

from lab.trust.format.flips import checked
from lab.trust.format.images import NAME, Image, OneFile
from lab.trust.format.lives import Life
from lab.trust.format.made import NOW, Block, Maker, content, segment
from lab.trust.format.pieces import Tally, Turn, memory
from stepwell.block.frame import VERSION as FRAME_VERSION
from stepwell.block.frame import FrameHeader
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import Sealer
from stepwell.errors import Unsupported
from stepwell.io.staging import Staging
from stepwell.tiers.base import Reading
from stepwell.tiers.disk.layout import RECORD, Footer, Head
from stepwell.tiers.disk.recovery import FileKind, look
from stepwell.vault.keyring import Keyring

NUMBERS = 1 << 16
_VERSION = slice(8, 10)
_READ = (1, FRAME_VERSION)
"""Versions that are read, of frames and of segments: pages of both look alike where nothing new is said."""
_staging = Staging(1)


def segments(turn: Turn, trailers: bool) -> Tally:
    """Of heads, or of trailers: with a head that is whole, and with one that is not."""
    tally = Tally()
    image = Image(Maker(2000, 2, sealed=True))
    headless = image.data.copy()
    headless[:PAGE] = 0
    for number in range(NUMBERS):
        for data in (image.data, headless) if trailers else (image.data,):
            page = data[-PAGE:] if trailers else data[:PAGE]
            page[_VERSION] = np.frombuffer(number.to_bytes(2, "little"), np.uint8)
            checked(page)
            kind = look(OneFile(data), NAME, _staging).kind
            tally.cases += number not in _READ
            if (kind is FileKind.OTHER_VERSION) is (number in _READ):
                tally.wrong(f"{turn.name}: version {number} is {kind.value}")
        if number % 1024 == 0 and turn.over:
            break
    return tally


class _Other(FrameHeader):
    """A header that says another version, rightly in all else."""

    number = 0

    def pack(self) -> bytes:
        page = np.frombuffer(super().pack(), np.uint8).copy()
        page[_VERSION] = np.frombuffer(self.number.to_bytes(2, "little"), np.uint8)
        checked(page)
        return page.tobytes()


def frames(turn: Turn, sealed: bool, first: int, step: int) -> Tally:
    """Frames that a later release could have written, sealed with our very key: unknown, and seen in a segment."""
    tally = Tally()
    maker = Maker(2000, sealed=sealed)
    image = Image(maker, closed=False)
    id, block = next(iter(image.blocks.items()))
    header = FrameHeader.parse(image.data[PAGE : 2 * PAGE].tobytes())
    assert header is not None and header.block == id
    key = maker.origin(block).keys.of(image.id) if sealed else None
    frame = image.data[PAGE : 3 * PAGE]
    payload = content(block, 0, maker.nbytes)
    other = _Other(**{name: getattr(header, name) for name in header.__slots__})
    for number in range(first, NUMBERS, step):
        _Other.number = number
        Sealer(other, key).make(0, payload, frame)
        answer = maker.open(block, [frame], image.id)
        tally.cases += number not in _READ
        if answer is not (Reading.GOOD if number in _READ else Reading.UNKNOWN):
            tally.wrong(f"{turn.name}: version {number} is {answer.value}")
        if number % 64 == first % 64:
            found = image.judge(tally, image.data, f"{turn.name}: version {number}")
            listed = found.footer is not None and id in [bytes(record["block"]) for record in found.footer.records]
            if listed is not (number in _READ) or found.unknown is listed:
                tally.wrong(f"{turn.name}: version {number} is {'' if listed else 'not '}found")
    return tally


def keyrings(turn: Turn, first: int, step: int) -> Tally:
    """And other ways to wrap keys: refused in words that name them, and the file stays as it is."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="stepwell-trust-", dir=memory()) as folder:
        path = Path(folder) / "keyring"
        Keyring.open(path)
        record = msgspec.json.decode(path.read_bytes())
        changes = [{"version": number} for number in range(first, NUMBERS, step) if number != record["version"]]
        for change in [*changes, {"version": 1 << 40}, {"version": -1}, {"wrap": "tpm"}, {"version": 2, "tenants": 7}]:
            bare = msgspec.json.encode(record | change | {"checksum": ""})
            made = record | change | {"checksum": blake3.blake3(bare).hexdigest()}
            raw = msgspec.json.encode(made) + b"\n"
            path.write_bytes(raw)
            tally.cases += 1
            try:
                Keyring.read(path)
                tally.wrong(f"{turn.name}: {change} was read")
            except Unsupported:
                pass
            if path.read_bytes() != raw:
                tally.wrong(f"{turn.name}: {change}: the file was changed")
    return tally


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    raw: bytes


def tiers(turn: Turn, first: int, count: int) -> Tally:
    """Directories full of segments of other versions: a life finds them, counts them all, writes beside them, and
    leaves each as it was. Every fourth has a damaged head, and a trailer of that version."""
    tally = Tally()
    head, footer = Head(segment(0), 1, 2 * PAGE, NOW).pack(), Footer(segment(0), np.empty(0, RECORD), ()).pack()
    with tempfile.TemporaryDirectory(prefix="stepwell-trust-", dir=memory()) as name:
        folder, files = Path(name), []
        for number in range(first, min(first + count, NUMBERS)):
            if number in _READ:
                continue
            data = np.frombuffer(head + footer, np.uint8).copy()
            for page in (data[:PAGE], data[PAGE:]):
                page[_VERSION] = np.frombuffer(number.to_bytes(2, "little"), np.uint8)
                checked(page)
            if number % 4 == 3:
                data[100:200] ^= 0xFF
            files.append(_File(f"{number:016x}.seg", data.tobytes()))
            (folder / files[-1].name).write_bytes(files[-1].raw)
        _live_beside(tally, turn, folder, len(files))
        for file in files:
            tally.cases += 1
            if (folder / file.name).read_bytes() != file.raw:
                tally.wrong(f"{turn.name}: {file.name} was changed")
    return tally


def _live_beside(tally: Tally, turn: Turn, folder: Path, kept: int) -> None:
    maker = Maker(2000, 2, sealed=True)
    for _ in range(2):
        life = Life(folder, maker, turn.seed)
        if life.tier.figures()["kept_segments"] != kept:
            tally.wrong(f"{turn.name}: {life.tier.figures()['kept_segments']} of {kept} were counted")
        for number in range(12):
            life.put(Block(number=number))
        life.end()
