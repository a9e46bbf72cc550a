"""A real well whose home hangs: it serves, answers and ends, and only what it would have written there is lost."""

from __future__ import annotations

import http.client
import random
import socket
from contextlib import closing
from pathlib import Path

import pytest

from lab.rig.caller import Caller, prefix
from lab.rig.well import RealWell, apart, eventually
from stepwell.client import control
from stepwell.policies.costs.prefill import MIN_SAMPLES, pairs
from stepwell.serve.home.calibration import COSTS_NAME
from stepwell.serve.metrics.endpoint import MAX_REQUESTS
from stepwell.testing.fuse import FaultyDisk, Rule, why_not

pytestmark = pytest.mark.kernel

NO_FUSE = why_not()
SHARD, BLOCKS = 32 << 10, 64
CHANGES = ("write", "fsync", "fsyncdir", "create", "open", "setattr", "rename", "rename2", "unlink")
STOP_S = 10.0
"""As long as `stepwell stop` waits."""


def healthy(address: Path) -> int:
    """The status of /healthz at the Unix socket `address`."""
    with closing(http.client.HTTPConnection("localhost", timeout=STOP_S)) as asking:
        asking.sock = socket.socket(socket.AF_UNIX)
        asking.sock.settimeout(STOP_S)
        asking.sock.connect(str(address))
        asking.request("GET", "/healthz")
        return asking.getresponse().status


@pytest.mark.skipif(bool(NO_FUSE), reason=f"no faulty disk here: {NO_FUSE}")
def test_a_well_whose_home_hangs_serves_makes_slabs_and_ends(tmp_path: Path) -> None:
    """Whoever writes there hangs until it is killed, as on a network filesystem whose server is gone."""
    dice = random.Random(3)
    with apart() as base, FaultyDisk(tmp_path) as disk:
        home = disk.path / "home"
        well = RealWell(home, host="64MiB", metrics=str(base / "metrics"))
        well.start()
        disk.set(*(Rule(op=op, hang=True) for op in CHANGES))
        with Caller(home, SHARD) as caller:  # the log is told of a session
            digests = prefix(dice, BLOCKS)
            eventually(lambda: caller.spill(digests) == BLOCKS, "there is room")
            caller.scheduler.timed([(100, pairs(100, 0), 0.5)] * MIN_SAMPLES, [])
            caller.scheduler.report(idle=True)  # as costs are learned, they are kept
            eventually(lambda: disk.report().hanging == 2, "log and costs hang")
            for number in range(6):  # slabs go from one engine to the next: made, populated, punched
                with Caller(home, SHARD, model=bytes([number]) * 32) as other:
                    own = prefix(dice, BLOCKS)
                    eventually(lambda other=other, own=own: other.spill(own) == BLOCKS, "it has room too")  # type: ignore[misc]
                    assert not other.recall_all(own).wrong
            assert caller.recall(digests).wrong == []
            assert well.count("slabs_retired") > 0 and disk.report().hanging == 2
            answer = control.pause(home, ["recalls"], "", seconds=0.1)
            assert [row.kind for row in answer.rows] == ["recalls"] and not answer.kept, "in force, not in home"
            assert control.stats(home)["paused_recalls"]
            for _ in range(MAX_REQUESTS + 2):
                assert healthy(base / "metrics") == 200
            assert disk.report().hanging == 2, "none of them has asked home"
            control.stop(home, seconds=STOP_S)
        eventually(lambda: not well.alive, "its process has ended")
        disk.heal()
        assert not (home / COSTS_NAME).exists()
        with RealWell(home, host="64MiB") as next_well:
            assert next_well.count("sessions") == 0
