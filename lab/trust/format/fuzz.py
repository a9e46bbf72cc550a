"""Headers, heads, footers and keyrings that nobody has written: refused, quietly and without taking memory."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import xxhash

from lab.trust.format.flips import checked
from lab.trust.format.gauge import Gauge
from lab.trust.format.images import PAGES, Image
from lab.trust.format.made import Block, Maker, content, segment
from lab.trust.format.pieces import Tally, Turn, memory
from lab.trust.format.segments import parsed
from stepwell.block.frame import FrameHeader
from stepwell.block.layout import PAGE, MiB
from stepwell.errors import AccessDenied, IntegrityError, Unsupported
from stepwell.io.memory import Bytes
from stepwell.tiers.base import Place, Reading
from stepwell.tiers.disk.layout import RECORD, Head, Trailer
from stepwell.vault.keyring import Keyring

_HEADER_AT = (8, 10, 11, 12, 16, 32, 64, 96, 112, 124, 126, 128, 136, 144, 152, 160)
_HEAD_AT = (8, 10, 16, 32, 40, 48, 56)
_TRAILER_AT = (8, 10, 16, 32, 40, 48, 64, 68, 128)
_RIGHT = 0.85  # share of what is given the right checksum: the rest ends there


def odd(dice: random.Random, nbytes: int) -> bytes:
    """An integer that is at the edge of something."""
    near = dice.choice((0, 1 << dice.randrange(8 * nbytes), (1 << 8 * nbytes) - 1, dice.randrange(1 << 8 * nbytes)))
    return ((near + dice.randint(-2, 2)) % (1 << 8 * nbytes)).to_bytes(nbytes, "little")


def changed(dice: random.Random, page: Bytes, fields: tuple[int, ...]) -> None:
    """Some fields get odd values, some bytes random ones; or all of the page is random, but for its magic."""
    kind = dice.random()
    if kind < 0.05:
        page[8:] = np.frombuffer(dice.randbytes(len(page) - 8), np.uint8)
    for _ in range(dice.randint(1, 3)):
        if kind < 0.6:
            at, nbytes = dice.choice(fields), dice.choice((1, 2, 4, 8))
            page[at : at + nbytes] = np.frombuffer(odd(dice, nbytes), np.uint8)
        else:
            page[dice.randrange(min(200, len(page)))] = dice.randrange(256)
    if dice.random() < _RIGHT:
        checked(page)


def headers(turn: Turn, number: int, times: int) -> Tally:
    """Of frames: opened for a recall, and, every fourth, copied for an eviction."""
    dice, tally = turn.dice(), Tally()
    maker = Maker(dice.randint(1, 2048), sealed=number % 2 == 0)
    block, place = Block(number=number), Place(segment(number), 0)
    (whole,) = maker.frames(block, place)
    frame, into, gauge = whole.copy(), np.empty_like(whole), Gauge(tally, MiB)
    for case in range(times):
        frame[:PAGE] = whole[:PAGE]
        changed(dice, frame[:PAGE], _HEADER_AT)
        same = bool((frame == whole).all())
        with gauge.case(f"{turn.name}: case {case}"):
            answer = maker.open(block, [frame], place.segment)
            _judge(tally, maker, block, answer, same, f"{turn.name}: case {case}")
            if case % 4:
                continue
            if maker.sealing.remake(frame, place.segment, into, Place(segment(-1), 9)) is Reading.GOOD:
                tally.right += 1
                parsed = FrameHeader.parse(frame[:PAGE].tobytes())
                if not same and (parsed is None or parsed.block != maker.outgoing(block).id):
                    tally.wrong(f"{turn.name}: case {case} was copied")
        if case % 1024 == 0 and turn.over:
            break
    gauge.end(turn.name)
    return tally


def _judge(tally: Tally, maker: Maker, block: Block, answer: Reading, same: bool, what: str) -> None:
    if answer is Reading.GOOD:
        tally.right += 1
        if not same or not (maker.slot(0) == content(block, 0, maker.nbytes)).all():
            tally.wrong(f"{what} was accepted")
    elif not maker.wiped():
        tally.wrong(f"{what} left something in a slot")


def heads(turn: Turn, number: int, times: int) -> Tally:
    """And footers, alone: what is accepted can be used."""
    dice, tally = turn.dice(), Tally()
    image = Image(Maker(2000, 2, sealed=True), number=number)
    head, footer = image.data[:PAGE].copy(), np.frombuffer(image.footer.pack(), np.uint8).copy()
    records, gauge = len(footer) - PAGE, Gauge(tally, MiB)
    for case in range(times):
        what = f"{turn.name}: case {case}"
        if case % 2:
            page = head.copy()
            changed(dice, page, _HEAD_AT)
            with gauge.case(what):
                parsed(Head.parse, page.tobytes())
            continue
        raw = footer.copy()
        if dice.random() < 0.7:
            _forge(dice, raw, records)
        else:
            changed(dice, raw[records:], _TRAILER_AT)
        with gauge.case(what):
            trailer = parsed(Trailer.parse, raw[records:].tobytes())
            if trailer is None:
                continue
            read = trailer.footer(raw[max(0, records - trailer.nbytes) : records].tobytes(), PAGES)
            if read is None:
                continue
            tally.right += 1
            ends = read.records["page"].astype(np.int64) + read.records["pages"]
            if len(read.records) and (int(ends.max()) > PAGES or int(read.records["page"].min()) < 1):
                tally.wrong(f"{what}: a record beyond the file")
        if case % 1024 == 0 and turn.over:
            break
    gauge.end(turn.name)
    return tally


def _forge(dice: random.Random, raw: Bytes, records: int) -> None:
    """Other records, under all the right checksums."""
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(records // RECORD.itemsize) * RECORD.itemsize + dice.choice((0, 32, 48, 52, 56, 60))
        nbytes = dice.choice((1, 4))
        raw[at : at + nbytes] = np.frombuffer(odd(dice, nbytes), np.uint8)
    page = raw[records:]
    page[48:64] = np.frombuffer(xxhash.xxh3_128_digest(raw[:records].tobytes()), np.uint8)
    checked(page)


def files(turn: Turn, number: int, times: int) -> Tally:
    """Whole segments, closed and open, with several changes in heads, frames, records and trailers: what a next life
    finds there and reads is what was written."""
    dice, tally = turn.dice(), Tally()
    image = Image(Maker(2000, 2, sealed=number % 2 == 0), number=number, closed=number % 4 < 2)
    gauge, found = Gauge(tally, MiB), Tally()
    end = len(image.data)
    for case in range(times):
        data = image.data.copy()
        for _ in range(dice.randint(1, 3)):
            kind = dice.randrange(4)
            if kind == 0:
                changed(dice, data[:PAGE], _HEAD_AT)
            elif kind == 1:
                page = PAGE * dice.randrange(1, PAGES)
                changed(dice, data[page : page + PAGE], _HEADER_AT)
            elif kind == 2:
                changed(dice, data[-PAGE:], _TRAILER_AT)
            else:
                _forge(dice, data[end - image.footer_bytes :], image.footer_bytes - PAGE)
        with gauge.case(f"{turn.name}: case {case}"):
            image.judge(found, data, f"{turn.name}: case {case}")
        if turn.over:
            break
    gauge.end(turn.name)
    found.cases = 0
    tally.add(found)
    return tally


def keyrings(turn: Turn, number: int, times: int) -> Tally:
    """Bytes that are none, and tables that a keyring cannot have, under the right checksum."""
    dice, tally = turn.dice(), Tally()
    with tempfile.TemporaryDirectory(prefix="stepwell-trust-", dir=memory()) as folder:
        path, gauge = Path(folder) / "keyring", Gauge(tally, 4 * MiB)
        Keyring.open(path)
        raw = path.read_bytes()
        record = msgspec.json.decode(raw)
        for case in range(times):
            made = _bytes(dice, raw) if case % 2 else _table(dice, record)
            path.write_bytes(made)
            with gauge.case(f"{turn.name}: case {case}"):
                try:
                    read = Keyring.read(path)
                except (IntegrityError, AccessDenied, Unsupported):
                    continue
                tally.right += 1
                if any(len(epoch.key) != 32 for tenant in read.tenants for epoch in tenant.epochs):
                    tally.wrong(f"{turn.name}: case {case}: a key of another length")
            if case % 256 == 0 and turn.over:
                break
    return tally


def _bytes(dice: random.Random, raw: bytes) -> bytes:
    made = bytearray(raw)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(made) + 1)
        some = dice.choice(
            (dice.randbytes(dice.randrange(8)), b"[" * dice.randrange(3000), b'"', b"{}", b"1e999", b"-")
        )
        made[at : at + dice.randrange(4)] = some
    return bytes(made)


def _table(dice: random.Random, record: dict[str, Any]) -> bytes:
    values: list[Any] = [0, -1, 2**63, 1.5, None, "", "default", [], {}, "A" * 44, "A" * 20000]

    def value() -> Any:
        return dice.choice(values)

    epoch = {"number": 1, "key": record["tenants"][0]["epochs"][0]["key"]} | ({"key": value()} if value() else {})
    epochs = [epoch | ({"number": value()} if dice.random() < 0.3 else {}) for _ in range(dice.randrange(4))]
    tenant = {
        "name": value() if dice.random() < 0.3 else "default",
        "epochs": epochs if dice.random() < 0.9 else value(),
    }
    tenants = [tenant] * dice.randrange(3) if dice.random() < 0.9 else value()
    made = record | {"tenants": tenants} | ({dice.choice(list(record)): value()} if dice.random() < 0.2 else {})
    if "checksum" in made:
        bare = msgspec.json.encode(made | {"checksum": ""})
        made |= {"checksum": blake3.blake3(bare).hexdigest()}
    return msgspec.json.encode(made) + b"\n"
