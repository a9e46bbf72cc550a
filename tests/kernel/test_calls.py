"""System calls that kill the well, fail or lie at their N-th time: nothing wrong is served, also by the next."""

from __future__ import annotations

import pytest
from seeds import budget, clean

from stepwell.trust.kills import calls, nth
from stepwell.trust.kills.nth import KILL, Plan

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(bool(calls.why_not()), reason=calls.why_not())]


@pytest.mark.parametrize(
    "plan",
    [
        Plan("pwritev2", KILL),
        Plan("linkat", KILL, fresh=True),
        Plan("openat", "error=EMFILE", fresh=True),
        Plan("fallocate", "error=ENOSPC", fresh=True),
        Plan("preadv2", "retval=4096"),
        Plan("pwritev2", "retval=4096"),
        Plan("recvfrom", "error=ECONNRESET"),
        Plan("epoll_ctl", "error=ENOSPC"),
    ],
    ids=lambda plan: f"{plan.call}-{plan.how.partition('=')[2]}",
)
def test_a_hindered_call(plan: Plan) -> None:
    tally = clean(nth.lane([plan])(budget(), 0, 2))
    assert tally.n["hit"], "the well makes this call"
