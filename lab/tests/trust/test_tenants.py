"""The campaign about tenants: quiet where they are kept apart, and loud where they are not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from lab.trust import tenants
from lab.trust.budget import Budget
from lab.trust.tenants import strangers
from lab.trust.tenants.strangers import auc
from stepwell.protocol import messages

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")


def budget(seed: int, scale: float) -> Budget:
    return Budget(seed, scale, tell=lambda text: None)


@pytest.mark.nightly
def test_tenants_do_not_meet_and_the_walks_go_where_they_could() -> None:
    first, reached = int.from_bytes(os.urandom(4), "big"), [0, 0, 0]
    for seed in range(first, first + 200):  # what is drawn for one may leave room for all; one in six does not
        if seed >= first + 10 and all(reached):
            break
        row = tenants.interleavings(budget(seed, 0.001), tenants.NAMES)
        assert (row.cases, row.violations, row.seed) == (100, 0, seed), row.evidence
        seen = re.findall(r"([\d,]+) (?:blocks|read|slabs)", row.remark)
        reached = [sum_ + int(n.replace(",", "")) for sum_, n in zip(reached, seen, strict=True)]
    compared, from_tier, moved = reached
    assert compared > 1000 and from_tier and moved, reached


def test_engines_of_one_tenant_are_seen_to_meet() -> None:
    row = tenants.interleavings(budget(1, 0.0005), ("a", "a", "b", "c"))
    assert row.violations > 0 and len(row.evidence) == 5


def test_a_well_that_listens_to_a_flood_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "_FLOODS", 0.2)
    assert tenants.interleavings(budget(1, 0.0002), tenants.NAMES).violations == 0
    monkeypatch.setattr(messages, "overlong", lambda message: False)
    row = tenants.interleavings(budget(1, 0.0002), tenants.NAMES)
    assert row.violations > 0 and "was listened to" in row.evidence[0]


def test_the_area_is_that_of_all_pairs_and_its_interval_holds_it() -> None:
    dice = np.random.default_rng(5)
    outside = 0
    for _ in range(300):
        x, y = dice.normal(0.5, 1, 150).round(1), dice.normal(0, 1, 120).round(1)
        found = auc(list(x), list(y))
        pairs = (x[:, None] > y).mean() + (x[:, None] == y).mean() / 2
        assert found.value == pytest.approx(pairs)
        outside += not found.low <= 0.63816 <= found.high  # of two normal distributions half a deviation apart
    assert outside <= 15, "a 99 % interval misses three times in 300"
    assert auc([2.0, 3.0], [0.0, 1.0]).value == 1.0


@pytest.mark.nightly
def test_a_well_that_shares_is_seen_by_asking_and_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """B comes in by A's socket: then it is A."""
    apart = strangers._well

    @contextmanager
    def shared() -> Iterator[strangers.Well]:
        with apart() as well:
            yield replace(well, b=well.a)

    monkeypatch.setattr(strangers, "_well", shared)
    hits, host, _ = strangers.run(budget(3, 0.01))  # a busy machine's disk may be given up, so nothing is said of it
    assert hits.violations >= 64, "all that A has in host memory"
    assert (host.cases, host.violations) == (50, 1), host


@pytest.mark.nightly
def test_a_clock_that_tells_nothing_apart_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = strangers.Session.found
    monkeypatch.setattr(strangers.Session, "found", lambda self, prefix: (found(self, prefix)[0], 1.0))
    _, host, disk = strangers.run(budget(4, 0.002))
    assert host.violations == disk.violations == 1 and "proves nothing" in host.evidence[0]
