"""Why a filesystem was not tried is said as it is."""

from __future__ import annotations

import pytest

from lab.trust import powercut
from lab.trust.budget import Budget


@pytest.mark.parametrize("xfs", ["", "no mkfs.xfs"])
def test_one_filesystem_is_enough_for_ci_and_one_that_cannot_be_made_is_called_that(
    xfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def series(kind: str, cuts: int, tally: powercut._Tally, dice: object) -> None:
        tally.cuts += cuts

    monkeypatch.setattr(powercut, "why_no_mounts", {"ext4": "", "xfs": xfs}.__getitem__)
    monkeypatch.setattr(powercut, "_series", series)
    rows = {row.promise: row for row in powercut.run(Budget(1, tell=lambda text: None))}
    assert rows["power cut on ext4: the well starts again"].cases == 10
    left = rows["power cut on xfs: right or a miss"]
    assert (left.cases, left.remark) == (0, f"not tried: {xfs or 'in the size of CI one filesystem is tried'}")
