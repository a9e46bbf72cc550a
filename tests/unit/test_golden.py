"""The format on disk is what it was: golden files, written by the present writer and read by the present reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import golden
from stepwell.block.frame import FrameHeader
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import ExpectedFrame, Opened, unseal
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.files import SystemFiles
from stepwell.io.memory import Bytes
from stepwell.io.staging import Staging
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.tiers.base import Incoming, Reading
from stepwell.tiers.disk.recovery import FileKind, look
from stepwell.tiers.disk.tier import DiskTier, Site

# Those of saved contexts have a test of their own, which needs torch.
FILES = sorted(path.name for path in golden.FOLDER.iterdir() if path.suffix != ".ctx")


def test_there_is_a_file_of_each_kind() -> None:
    assert sorted(golden.all_files()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_the_writer_makes_these_bytes(name: str) -> None:
    assert golden.all_files()[name] == (golden.FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", ["plain-1.frame", "sealed-1.frame", "plain-2.frame", "sealed-2.frame"])
def test_the_reader_opens_these_frames(name: str) -> None:
    frame = np.fromfile(golden.FOLDER / name, np.uint8)
    into = np.empty(golden.PAYLOAD, np.uint8)
    block = golden.ORIGIN.name(golden.digest(0))
    expected = ExpectedFrame(golden.SEGMENT, block, golden.ORIGIN.tag, 0, golden.SHARDS, golden.PAYLOAD)
    sealed = name.startswith("sealed")
    assert unseal(frame, expected, golden.key(), into, sealed=sealed, now=golden.NOW) is Opened.GOOD
    assert (into == golden.payload(0, 0)).all()
    header = FrameHeader.parse(frame[:PAGE].tobytes())
    assert header is not None and header.position == (-1 if "-1." in name else 0)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("closed", [True, False])
def test_a_tier_finds_and_reads_these_segments(closed: bool, version: int, tmp_path: Path) -> None:
    name = f"{'closed' if closed else 'open'}-{version}.seg"
    (tmp_path / golden.SEGMENT_NAME).write_bytes((golden.FOLDER / name).read_bytes())
    files, executor = SystemFiles(tmp_path), SeededExecutor(1)
    found = look(files, golden.SEGMENT_NAME, Staging(1 << 20))
    assert (found.kind, found.closed) == (FileKind.GOOD, closed)
    assert found.head is not None and found.head.id == golden.SEGMENT
    assert found.footer is not None and len(found.footer.records) == golden.BLOCKS
    sealing = Sealing(golden.KEYRING, sealed=True, wall=lambda: golden.NOW)
    tier = DiskTier([Site(files, 64 << 20, 0)], executor, SetClock(), lambda: golden.NOW, sealing)
    tier.recover(lambda n: None)
    executor.drain()
    (origin,) = sealing.origins("default", golden.NAMESPACE)
    for block in range(golden.BLOCKS):
        got = [np.empty(golden.PAYLOAD, np.uint8) for _ in range(golden.SHARDS)]

        def open(part: int, frame: Bytes, segment: bytes, block: int = block, got: list[Bytes] = got) -> Reading:
            identity = (origin.name(golden.digest(block)), origin.tag, part, golden.SHARDS, golden.PAYLOAD)
            expected = ExpectedFrame(segment, *identity)
            verdict = unseal(frame, expected, origin.keys.of(segment), got[part], sealed=True, now=golden.NOW)
            assert verdict is Opened.GOOD
            return Reading.GOOD

        answers: list[list[Reading]] = []
        parts = (len(golden.frame(sealed=True)),) * golden.SHARDS
        tier.read([Incoming(origin.name(golden.digest(block)), parts, open)], answers.append)
        executor.drain()
        assert answers == [[Reading.GOOD]]
        assert [(shard == golden.payload(block, n)).all() for n, shard in enumerate(got)] == [True] * golden.SHARDS
    tier.close()
