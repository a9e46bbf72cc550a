"""The campaigns over real disks, in a small size: they run through, count what they compared, and nothing is broken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.trust import devices, powercut
from lab.trust.budget import Budget
from lab.trust.disks.harm import DAMAGE, FAULTS, REAL
from stepwell.testing.fuse import why_not
from stepwell.testing.mounts import why_no_mounts

pytestmark = pytest.mark.kernel
SEED = 11


@pytest.mark.nightly
def test_devices() -> None:
    rows = {row.promise: row for row in devices.run(Budget(SEED, scale=0.004))}
    assert {name: row.evidence for name, row in rows.items() if row.violations} == {}
    for why, kinds in (("", [*DAMAGE]), (why_not(), [*FAULTS]), (why_no_mounts("ext4"), [*REAL])):
        tried = [rows[f"{kind}: right or a miss, in time"] for kind in kinds]
        assert all(why in row.remark for row in tried)
        assert all(bool(row.cases) <= ("blocks compared from" in row.remark) for row in tried)
        assert not (why and any(row.cases for row in tried))
    assert sum(row.cases for row in rows.values() if "blocks compared from" in row.remark), "some harm has come"


needs_image = pytest.mark.skipif(
    bool(why_no_mounts("ext4")), reason=f"no filesystem in a file here: {why_no_mounts('ext4')}"
)


@pytest.mark.nightly
@needs_image
def test_power_cuts() -> None:
    rows = {row.promise: row for row in powercut.run(Budget(SEED, scale=0.01))}
    assert {name: row.evidence for name, row in rows.items() if row.violations} == {}
    assert rows["power cut on ext4: the well starts again"].cases == 2
    assert rows["power cut on ext4: the keyring is intact"].cases == 1
    assert rows["power cut on ext4: right or a miss"].cases > 0


FORGETFUL = """
import numpy as np
from stepwell.tiers.disk import recovery

recovery._scan = lambda file, segment, *_: (recovery.Footer(segment, np.array([], recovery.RECORD), ()), False)
"""


class AtRest(random.Random):
    """A cut right after a prefix was written and synced, of a new well whose first segment is open."""

    def uniform(self, a: float, b: float) -> float:
        return a

    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[-1]


@needs_image
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_well_that_forgets_what_was_synced_is_seen(
    forgetful: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORGETFUL if forgetful else "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(powercut, "FOUND_S", 1.0)
    tally = powercut._Tally(cuts=1)
    powercut._series("ext4", 1, tally, AtRest(SEED))
    assert tally.failures == []
    assert (tally.synced, tally.moved) == (powercut.BLOCKS, 0)
    assert tally.lost == powercut.BLOCKS * forgetful
