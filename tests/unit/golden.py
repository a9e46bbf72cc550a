"""The files in tests/golden: what they are made of, made by the present writer from fixed inputs.

Run as a program it writes them: only for a new version of the format, whose files get names of their own.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from stepwell.block.frame import AES_256_GCM, CHUNK, PLAIN, VERSION, FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.block.namespace import Namespace
from stepwell.codecs.seal import NO_COMMITMENT, SegmentKey, seal
from stepwell.hierarchy.arena.origin import Origin, SegmentKeys
from stepwell.io.memory import Bytes
from stepwell.tiers.disk.layout import Footer, Head
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

FOLDER = Path(__file__).parent.parent / "golden"
EPOCH = Epoch(1, bytes(range(32)))
KEYRING = Keyring((TenantKeys("default", (EPOCH,)),))
NAMESPACE = Namespace(b"w" * 32, b"m" * 32, b"l" * 32, 16)
ORIGIN = Origin(EPOCH, SegmentKeys(EPOCH), NAMESPACE)
SEGMENT = b"golden segment 1"
CREATED, NOW = 1_800_000_000, 1_800_000_100
PAYLOAD, SHARDS, BLOCKS, PAGES = 2048, 2, 3, 16
SEGMENT_NAME = "0123456789abcdef.seg"


def key(segment: bytes = SEGMENT) -> SegmentKey:
    return ORIGIN.keys.of(segment)


def digest(block: int) -> bytes:
    return bytes([block]) * 32


def payload(block: int, shard: int, nbytes: int = PAYLOAD) -> Bytes:
    return np.frombuffer(random.Random(f"golden {block} {shard}").randbytes(nbytes), np.uint8)


class FirstHeader(FrameHeader):
    """As version 1 wrote it."""

    def pack(self) -> bytes:
        return of_version_1(super().pack(), 160, 184)


def of_version_1(page: bytes, first: int, end: int) -> bytes:
    """The page of version 2 without its fields from `first` to `end`."""
    made = page[:8] + b"\1\0" + page[10:first] + bytes(end - first) + page[end:-4]
    return made + zlib.crc32(made).to_bytes(4, "little")


def first(header: FrameHeader) -> FirstHeader:
    return FirstHeader(**{field.name: getattr(header, field.name) for field in fields(header)})


def header(block: int, shard: int, *, sealed: bool) -> FrameHeader:
    nonce = b"\1\2\3\4" + (block * SHARDS + shard).to_bytes(8, "big")
    return FrameHeader(
        AES_256_GCM if sealed else PLAIN,
        SEGMENT,
        key().commitment if sealed else NO_COMMITMENT,
        ORIGIN.name(digest(block)),
        ORIGIN.tag,
        nonce,
        shard,
        SHARDS,
        PAYLOAD,
        PAYLOAD,
        CREATED,
        position=block,
    )


def frame(block: int = 0, shard: int = 0, *, sealed: bool, version: int = VERSION) -> Bytes:
    made = np.full(frame_bytes(PAYLOAD), 0xEE, np.uint8)
    said = header(block, shard, sealed=sealed)
    seal(first(said) if version == 1 else said, key() if sealed else None, payload(block, shard), made)
    return made


def large(version: int) -> bytes:
    """The BLAKE3 of a sealed frame of three chunks, in words: the frame itself is not small."""
    nbytes = 2 * CHUNK + 100
    made = np.full(frame_bytes(nbytes), 0xEE, np.uint8)
    said = replace(header(0, 0, sealed=True), payload=nbytes, raw=nbytes)
    seal(first(said) if version == 1 else said, key(), payload(0, 0, nbytes), made)
    return f"{blake3(made.data).hexdigest()} {len(made)} bytes\n".encode()


def segment(version: int = VERSION, *, closed: bool) -> bytes:
    """A segment of sealed blocks, one after the other."""
    file = np.zeros(PAGES * PAGE, np.uint8)
    file[:PAGE] = np.frombuffer(Head(SEGMENT, 7, len(file), CREATED).pack(), np.uint8)
    books = Segment(1, SEGMENT_NAME, SEGMENT, 7, len(file), SegmentPhase.OPEN)
    for block in range(BLOCKS):
        frames = np.concatenate([frame(block, shard, sealed=True, version=version) for shard in range(SHARDS)])
        assert books.fits(len(frames), key().commitment)
        page, _ = books.take(len(frames), SHARDS, key().commitment)
        file[page * PAGE : page * PAGE + len(frames)] = frames
        books.record(ORIGIN.name(digest(block)), ORIGIN.tag, page, len(frames), key().commitment, 0)
    if closed:
        footer = books.footer().pack()
        assert len(footer) == Footer.nbytes(BLOCKS)
        file[-len(footer) :] = np.frombuffer(footer, np.uint8)
    if version > 1:
        return file.tobytes()
    head, rest, trailer = (part.tobytes() for part in np.split(file, [PAGE, -PAGE]))
    return of_version_1(head, 160, 160) + rest + (of_version_1(trailer, 68, 76) if closed else trailer)


def all_files() -> dict[str, bytes]:
    return {
        name: content
        for n in (1, VERSION)
        for name, content in {
            f"plain-{n}.frame": frame(sealed=False, version=n).tobytes(),
            f"sealed-{n}.frame": frame(sealed=True, version=n).tobytes(),
            f"large-{n}.blake3": large(n),
            f"closed-{n}.seg": segment(n, closed=True),
            f"open-{n}.seg": segment(n, closed=False),
        }.items()
    }


if __name__ == "__main__":
    for name, content in all_files().items():
        (FOLDER / name).write_bytes(content)
