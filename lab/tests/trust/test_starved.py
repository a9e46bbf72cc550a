"""No more files, no more memory, another well on the directory.

What the campaign `kills` tries in CI too, with more cases, is tried here by night alone; by day, that it would see."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from lab.rig.caller import Caller, prefix
from lab.rig.well import apart, eventually
from lab.trust.kills import memory, starved
from stepwell.client import control

from .seeds import budget, clean

pytestmark = pytest.mark.kernel


@pytest.mark.nightly
@pytest.mark.skipif(bool(starved.files_why_not()), reason=starved.files_why_not())
def test_a_well_that_may_open_no_more_files_goes_on() -> None:
    assert clean(starved.files(budget(), 0, 2)).n["cases"] == 2


@pytest.mark.nightly
@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_a_well_keeps_to_its_memory_and_may_be_killed_for_it() -> None:
    assert clean(starved.limited_memory(budget(), 0, 1)).n["cases"] == 1


@pytest.mark.nightly
def test_a_directory_has_one_well_and_none_after_a_kill() -> None:
    assert clean(starved.two_wells(budget(), 0, 1)).n["cases"] == 1


_TELLS = """
import os, sys
serves = sys.argv.pop(1)
sys.addaudithook(lambda event, told: event == "import" and os.path.exists(serves) and print(told[0], flush=True))
from stepwell.cli.main import main
main()
"""


def test_a_well_that_serves_loads_no_modules() -> None:
    """It could not, without descriptors, and would end at what is no more than its work."""
    with apart() as folder:
        home, serves, dice = folder / "home", folder / "serves", random.Random(1)
        serve = ["serve", "--home", str(home), "--host", "64MiB", "--disk", f"{folder / 'disk'}:64MiB"]
        command = [sys.executable, "-c", _TELLS, str(serves), *serve]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as well:
            try:
                eventually(lambda: control.pid(home) is not None, "it serves", 30)
                with Caller(home, 32 << 10) as caller:
                    known = [prefix(dice, 48) for _ in range(60)]
                    serves.touch()
                    for at, digests in enumerate(known):  # more than the disk holds: segments are evicted
                        caller.spill(digests)
                        if at % 10 == 9:
                            eventually(lambda: not control.stats(home)["disk_write_queue_bytes"], "all is written", 30)
                            control.clear(home, ["host"])
                            assert caller.recall(digests).staged
                    (row,) = control.namespaces(home)
                    control.clear(home, ["host", "disk"], namespace=row.tag)
                    assert not control.stats(home)["disk_blocks"]
                control.stop(home)
                said, _ = well.communicate(timeout=30)
            finally:
                well.kill()
        assert not [line for line in said.splitlines() if " " not in line], said
