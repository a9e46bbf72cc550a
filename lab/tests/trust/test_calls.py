"""System calls that kill the well, fail or lie at their N-th time: nothing wrong is served, also by the next.

What the campaign `kills` tries in CI too, with more cases, is tried here by night alone; by day, that it would see."""

from __future__ import annotations

import pytest

from lab.trust.kills.ground import ground
from lab.trust.kills.nth import calls
from lab.trust.kills.nth import engines as nth_engines
from lab.trust.kills.nth import wells as nth
from lab.trust.kills.nth.wells import KILL, Nth, Plan
from lab.trust.kills.processes import ForkServer

from .seeds import budget, clean

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(bool(calls.why_not()), reason=calls.why_not())]


@pytest.mark.parametrize(
    "plan",
    [
        Plan("fallocate", "error=ENOSPC", fresh=True),
        pytest.param(Plan("pwritev2", KILL), marks=pytest.mark.nightly),
        pytest.param(Plan("linkat", KILL, fresh=True), marks=pytest.mark.nightly),
        pytest.param(Plan("openat", "error=EMFILE", fresh=True), marks=pytest.mark.nightly),
        pytest.param(Plan("preadv2", "retval=4096"), marks=pytest.mark.nightly),
        pytest.param(Plan("pwritev2", "retval=4096"), marks=pytest.mark.nightly),
        pytest.param(Plan("recvfrom", "error=ECONNRESET"), marks=pytest.mark.nightly),
        pytest.param(Plan("epoll_ctl", "error=ENOSPC"), marks=pytest.mark.nightly),
    ],
    ids=lambda plan: f"{plan.call}-{plan.how.partition('=')[2]}",
)
def test_a_hindered_call(plan: Plan) -> None:
    tally = clean(nth.lane([plan])(budget(), 0, 2))
    assert tally.n["hit"], "the well makes this call"


def test_a_life_that_is_not_hindered_and_ends_otherwise_than_asked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nth, "_stop", staticmethod(lambda place, life: life.kill()))
    with ground() as place, ForkServer(place) as server:
        nth = Nth(place, server, Plan("accept4", "error=EMFILE", fresh=True))
        assert not nth.one(10_000)
        assert nth.tally.n["hit"] == 0
        assert "not hindered at all" in nth.tally.evidence["broken"][0]


@pytest.mark.nightly
def test_engines_are_killed_at_calls_of_theirs() -> None:
    number = nth_engines.CALLS.index("sendmsg")
    tally = clean(nth_engines.kills(budget(), number, 4))
    assert tally.n["kills"] >= 3, "an engine asks and answers by messages"
