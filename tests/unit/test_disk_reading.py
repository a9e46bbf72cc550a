"""Reads of a damaged device: a bad spot costs the block that it is in; footers and heads that nobody of us wrote."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from disks import MIB, SEGMENT, Life, failure

from stepwell.block.layout import PAGE
from stepwell.io.files import SystemFile
from stepwell.io.memory import Bytes
from stepwell.tiers.base import Reading, Writing
from stepwell.tiers.disk.layout import Footer, Head, Trailer


def bad_spot(life: Life, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device cannot read the second page of this block."""
    place = life.tier._index.find(life.id(n))
    assert place is not None
    bad, healthy = place.page * PAGE + PAGE, SystemFile.read

    def read(file: SystemFile, into: Bytes, offset: int) -> int:
        if offset <= bad < offset + len(into):
            raise failure(errno.EIO)
        return healthy(file, into, offset)

    monkeypatch.setattr(SystemFile, "read", read)


def read(life: Life, numbers: range) -> list[Reading]:
    answers: list[list[Reading]] = []
    life.tier.read([life.sealing.incoming(life.entry(n)) for n in numbers], answers.append)
    life.executor.drain()
    return answers[0]


def test_a_bad_spot_costs_the_block_that_it_is_in_and_it_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    life.put_all(range(8))
    bad_spot(life, 5, monkeypatch)
    answers = read(life, range(8))
    assert [n for n, answer in enumerate(answers) if answer is not Reading.GOOD] == [5]
    assert answers[5] is Reading.FAILED
    assert life.here(range(8)) == set(range(8)) - {5}, "so that whoever has it writes it again"
    assert life.put(5) == [Writing.STORED]
    assert read(life, range(8)) == [Reading.GOOD] * 8
    life.end()


def test_a_device_that_reads_nothing_keeps_its_blocks(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(8))
    life.files[0].fail(errno.EIO, "read")
    assert read(life, range(8)) == [Reading.FAILED] * 8
    assert life.here(range(8)) == set(range(8))
    life.files[0].heal()
    assert read(life, range(8)) == [Reading.GOOD] * 8
    life.end()


def test_what_is_used_above_survives_its_segment(tmp_path: Path) -> None:
    """A prefix that is always served from host memory is not read from disk, and is wanted there after a restart."""
    life = Life(tmp_path)
    life.put_all(range(4 * (SEGMENT // MIB) * 3))
    hot = {0, 1, 2, 3}
    for n in hot:
        life.tier.touch(life.id(n))
    life.tier.touch(bytes(32))  # of a block that is not here: nothing happens
    more = 1000
    while life.here(range(20)) == set(range(20)):
        life.put_all(range(more, more + 8))
        more += 8
    assert life.here(range(20)) == hot
    assert life.good(range(20)) == hot
    life.end()


def test_a_footer_whose_records_have_no_keys_is_not_believed(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.put_all(range(4))
    life.end()
    raw = next(tmp_path.glob("*.seg")).read_bytes()
    trailer = Trailer.parse(raw[-PAGE:])
    assert trailer is not None
    records = raw[-PAGE - trailer.nbytes : -PAGE]
    footer = trailer.footer(records, SEGMENT // PAGE)
    assert footer is not None
    keyless = Footer(footer.segment, footer.records, ()).pack()
    parsed = Trailer.parse(keyless[-PAGE:])
    assert parsed is not None
    assert parsed.footer(keyless[:-PAGE], SEGMENT // PAGE) is None


def test_a_head_with_a_number_after_which_none_could_come_is_none() -> None:
    assert Head.parse(Head(b"s" * 16, (1 << 63) - 1, SEGMENT, 0).pack()) is not None
    assert Head.parse(Head(b"s" * 16, 1 << 63, SEGMENT, 0).pack()) is None
