"""Damage says whether it has changed anything: what was not harmed is no case."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lab.trust.disks.harm import DAMAGE, MIB


def segments(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("count", [1, 2])
def test_what_it_says_it_has_changed(kind: str, count: int, tmp_path: Path) -> None:
    dice = random.Random(7)
    said: set[bool] = set()
    for _ in range(8):
        for number in range(count):
            (tmp_path / f"{number}.seg").write_bytes(dice.randbytes(MIB))
        before = segments(tmp_path)
        changed = DAMAGE[kind](tmp_path / "0.seg", dice)
        assert changed == (segments(tmp_path) != before)
        said.add(changed)
    assert (True in said) == (kind != "segments exchanged" or count == 2)


def test_pages_that_come_to_lie_where_they_were_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "0.seg").write_bytes(bytes(MIB))
    assert not DAMAGE["segments with pages in other places"](tmp_path / "0.seg", random.Random(7))
