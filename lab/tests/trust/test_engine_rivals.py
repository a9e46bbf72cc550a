"""Second wells and wells without descriptors, by real wells without engines."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from lab.rig.well import RealWell, until
from lab.trust.engine import well as wells
from lab.trust.engine.rivals import Descriptors, Rivals
from lab.trust.engine.well import DISK, HOST, TestedWell


@pytest.fixture
def well() -> Iterator[TestedWell]:
    with wells.tested_well(1) as tested, RealWell(tested.home, host=HOST, disk=f"{tested.disk}:{DISK}"):
        yield tested


@pytest.mark.parametrize("choice", [0, 1])
def test_a_second_well_is_refused_on_the_directory_and_in_the_home(well: TestedWell, choice: int) -> None:
    assert Rivals(well).strike(_choosing(choice)) == 1
    assert well.unrefused == [] and well.stats()


@pytest.mark.parametrize("said", ["it serves", "SW-502"])
def test_a_second_well_that_is_not_refused_is_told(
    well: TestedWell, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if said == "it serves":
            raise subprocess.TimeoutExpired(command, 60)
        return subprocess.CompletedProcess(command, 1, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert Rivals(well).strike(_choosing(0)) == 0
    assert len(well.unrefused) == 1 and "not refused with SW-506" in well.unrefused[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may count a well's descriptors")
def test_a_well_without_descriptors_gets_them_back(well: TestedWell) -> None:
    fault, dice = Descriptors(well), random.Random(1)
    assert until(lambda: bool(well.pid()), 30), "it answers"
    fault.begin(dice)
    assert until(lambda: fault.strike(dice) == 1, 30)  # it looks away for a second when it cannot accept
    fault.end(dice)
    assert until(lambda: bool(well.stats()), 10)


def _choosing(choice: int) -> random.Random:
    class Dice(random.Random):
        def choice(self, seq: Any) -> Any:
            return seq[choice]

    return Dice(1)
