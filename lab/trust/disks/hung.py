"""How much longer a request takes because the disk under it hangs, one request at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from lab.rig.caller import prefix
from lab.rig.well import eventually
from lab.trust.budget import Budget
from lab.trust.disks.stages import staged
from lab.trust.report import Row
from stepwell.client.patience import STALL_S
from stepwell.protocol.messages import MAX_ALLOWED_S
from stepwell.testing.fuse import Rule, why_not

LIMIT_S, BUSY_S = STALL_S + MAX_ALLOWED_S, 0.01
"""What a request may wait at most while nothing comes (docs/design/adr/0009 and 0031: so long on a device that has not
answered 2,048 reads yet, and on any if much is at stake), and what an engine's steps and the machine may add in 99 of
100."""

_BLOCKS = 16


def lone(budget: Budget, samples: int) -> Row:
    promise = "a hung disk adds its limit and at most 10 ms to a lone request"
    if why := why_not():
        return Row(promise, 0, 0, budget.seed, f"not tried: {why}")
    waits: list[float] = []
    queued: list[float] = []
    dice = budget.dice("devices", "lone")
    with staged(dice.randrange(1 << 32), faulty=True) as stage:
        assert stage.disk is not None
        digests = prefix(dice, _BLOCKS)
        stage.caller.spill(digests)
        eventually(stage.well.written, "all is written")
        while len(waits) < samples and not budget.over:
            stage.well.forget_host()
            stage.disk.set(Rule(op="read", name="*.seg", hang=True))
            before = _queued_s()
            got = stage.caller.recall(digests)
            if not got.blocks and stage.disk.report().hanging:  # else it was not the disk that it waited for
                waits.append(got.wait_s)
                queued.append(_queued_s() - before)
            stage.disk.heal()
            stage.caller.recall_all(digests)
    late = sum(wait - idle > LIMIT_S + BUSY_S for wait, idle in zip(waits, queued, strict=True))
    p50, p99 = (1000 * float(np.percentile(waits, share)) for share in (50, 99)) if waits else (0.0, 0.0)
    remark = (
        f"limit {1000 * LIMIT_S:.0f} ms; p50 {p50:.1f} ms, p99 {p99:.1f} ms, of which the caller waited at most "
        f"{1000 * max(queued, default=0.0):.1f} ms for a processor; without that {late} were later than the limit and "
        f"10 ms, which counts beyond 1 %; load {os.getloadavg()[0]:.1f}"
    )
    return Row(promise, len(waits), late if late > len(waits) / 100 else 0, budget.seed, remark)


def _queued_s() -> float:
    """How long this thread has waited for a processor so far: other programs' doing, not the disk's or the well's. 0
    where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
