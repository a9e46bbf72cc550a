"""Heads, footers, trailers and keyrings of which bits have changed, and files that were cut or have grown."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from lab.trust.format.flips import checked
from lab.trust.format.images import PAGES, Image
from lab.trust.format.made import NOW, Maker, segment
from lab.trust.format.pieces import Tally, Turn, memory
from stepwell.block.layout import PAGE
from stepwell.errors import StepwellError
from stepwell.tiers.disk.layout import Footer, Head, OtherVersion, Trailer
from stepwell.vault.keyring import Keyring

NBYTES, SHARDS = 2000, 2
Page = TypeVar("Page", Head, Trailer)


def every_bit(turn: Turn, number: int) -> Tally:
    """Of a head, and of a footer with its trailer: refused by those who read them."""
    tally = Tally()
    head = Head(segment(number), 7 + number, PAGES * PAGE, NOW)
    page = bytearray(head.pack())
    for bit in range(8 * PAGE):
        page[bit // 8] ^= 1 << bit % 8
        tally.cases += 1
        if parsed(Head.parse, bytes(page)) is not None:
            tally.wrong(f"{turn.name}: bit {bit} of a head")
        page[bit // 8] ^= 1 << bit % 8
    raw = bytearray(Image(Maker(NBYTES, SHARDS, sealed=True), number=number).footer.pack())
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        tally.cases += 1
        if read_footer(bytes(raw)) is not None:
            tally.wrong(f"{turn.name}: bit {bit} of a footer")
        raw[bit // 8] ^= 1 << bit % 8
        if bit % 8192 == 0 and turn.over:
            break
    return tally


def parsed(parse: Callable[[bytes], Page | None], page: bytes) -> Page | None:
    """What a page says; None if it is refused, be it for its version."""
    try:
        return parse(page)
    except OtherVersion:
        return None


def read_footer(raw: bytes) -> Footer | None:
    """As recovery does, from the bytes at the end of a file."""
    trailer = parsed(Trailer.parse, raw[-PAGE:])
    if trailer is None or trailer.nbytes > len(raw) - PAGE:
        return None
    return trailer.footer(raw[len(raw) - PAGE - trailer.nbytes : -PAGE], PAGES)


def bits_of_a_file(turn: Turn, number: int, step: int) -> Tally:
    """Each `step`th bit of a segment's head, records and trailer, with and without the right checksum of its page: what
    the next life finds and reads is what was written."""
    tally = Tally()
    image = Image(Maker(NBYTES, SHARDS, sealed=number % 2 == 0), number=number)
    data, end = image.data, len(image.data)
    places = [*range(PAGE), *range(end - image.footer_bytes, end)]
    for at in range(turn.dice().randrange(step), 8 * len(places), step):
        place, bit = places[at // 8], 1 << at % 8
        first = place // PAGE * PAGE
        old = data[first : first + PAGE].copy()
        data[place] ^= bit
        image.judge(tally, data, f"{turn.name}: byte {place}, bit {at % 8}")
        if first in (0, end - PAGE) and place % PAGE < PAGE - 4:
            checked(data[first : first + PAGE])
            image.judge(tally, data, f"{turn.name}: byte {place}, bit {at % 8}, right checksum")
        data[first : first + PAGE] = old
        if turn.over:
            break
    return tally


def every_length(turn: Turn, closed: bool, sealed: bool) -> Tally:
    """A segment's file with any number of bytes less, or up to a page more."""
    tally = Tally()
    image = Image(Maker(NBYTES, sealed=sealed), closed=closed, pages=7)
    longer = np.concatenate([image.data, np.full(PAGE, 0xEE, np.uint8)])
    for length in range(len(longer) + 1):
        image.judge(tally, longer[:length], f"{turn.name}: {length} bytes")
        if turn.over:
            break
    return tally


def keyring(turn: Turn) -> Tally:
    """Every bit and every length of a keyring: refused, or the same keys."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="stepwell-trust-", dir=memory()) as folder:
        path = Path(folder) / "keyring"
        whole = Keyring.open(path)
        raw = path.read_bytes()
        flipped = bytearray(raw)
        changed: list[tuple[str, bytes]] = []
        for bit in range(8 * len(raw)):
            flipped[bit // 8] ^= 1 << bit % 8
            changed.append((f"bit {bit}", bytes(flipped)))
            flipped[bit // 8] ^= 1 << bit % 8
        changed += [(f"{length} bytes", (raw + raw)[:length]) for length in range(2 * len(raw) + 1)]
        changed += [(f"{length} zeros", raw + bytes(length)) for length in range(1, PAGE)]
        for what, data in changed:
            tally.cases += 1
            path.write_bytes(data)
            try:
                found = Keyring.open(path)
            except StepwellError:
                found = None
            if found is not None:
                tally.right += 1
                if found != whole:
                    tally.wrong(f"{turn.name}: {what}: other keys")
            if path.read_bytes() != data:
                tally.wrong(f"{turn.name}: {what}: the file was changed")
    return tally
