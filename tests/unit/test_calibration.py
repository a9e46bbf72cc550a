"""What is learned of prefill's cost, kept in home for the next well, and bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from wells import PATIENCE

from stepwell.hierarchy.saved import Calibrations, StateStore
from stepwell.hierarchy.sessions.costs import KEEP_EVERY_S, MAX_NAMESPACES, Costs
from stepwell.policies.costs.prefill import MIN_SAMPLES, pairs
from stepwell.serve.home.calibration import COSTS_NAME, CostList
from stepwell.serve.home.state_file import StateWriter
from stepwell.testing.clock import SetClock

STEP = (100, pairs(100, 0), 0.5)
KNOWN = [STEP] * MIN_SAMPLES


@pytest.fixture
def keeper() -> Iterator[StateWriter]:
    made = StateWriter()
    yield made
    assert made.close(PATIENCE)


class Saves(StateStore):
    def __init__(self) -> None:
        self.calibrations: list[Calibrations] = []

    def save_calibrations(self, calibrations: Calibrations) -> None:
        self.calibrations.append(calibrations)


def costs(earlier: Calibrations | None = None) -> tuple[Costs, SetClock, list[Calibrations]]:
    clock, store = SetClock(), Saves()
    return Costs(clock, 1 << 20, earlier, store), clock, store.calibrations


def test_what_one_well_has_learned_the_next_one_knows(tmp_path: Path, keeper: StateWriter) -> None:
    assert CostList(tmp_path).read() == {}
    learned, _, kept = costs()
    learned.heard(b"a" * 16, KNOWN, [])
    CostList(tmp_path).keep(kept[-1], keeper)
    assert keeper.settle(PATIENCE)
    found = CostList(tmp_path).read()
    assert found == learned.learned
    assert (tmp_path / COSTS_NAME).stat().st_mode & 0o777 == 0o600
    again, _, _ = costs(found)
    cost = again.known(b"a" * 16, 100, {}).prefill
    assert cost is not None
    assert cost.seconds(100) == pytest.approx(0.5, rel=0.1)
    assert again.known(b"b" * 16, 100, {}).prefill is None


def test_it_is_written_down_now_and_then() -> None:
    learned, clock, kept = costs()
    learned.heard(b"a", [STEP], [])
    assert kept == [], "nothing is known yet"
    for _ in range(3):
        learned.heard(b"a", KNOWN, [])
    assert len(kept) == 1
    clock.advance(KEEP_EVERY_S)
    learned.heard(b"a", KNOWN, [])
    assert len(kept) == 2


def test_namespaces_are_bounded_and_those_of_whom_nothing_is_heard_go_first() -> None:
    learned, _, _ = costs()
    tags = [n.to_bytes(4, "big") for n in range(3 * MAX_NAMESPACES)]
    for tag in tags:
        learned.heard(tag, KNOWN, [])
        learned.heard(tags[0], KNOWN, [])
    assert len(learned._engines) <= MAX_NAMESPACES
    assert len(learned._earlier) <= MAX_NAMESPACES
    assert len(learned.learned) == MAX_NAMESPACES
    assert tags[0] in learned.learned and tags[-1] in learned.learned


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"zz": [1, 2, 3, 4]}', b'{"aa": [1]}', b'{"aa": 5}', b'{"aa": ["x", 1, 1, 1]}', b"null",
     b'{"aa": [1, 1, 1, 1e999]}', b"[" * 100_000, b"\xff\xfe"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_costs_no_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / COSTS_NAME).write_bytes(content)
    assert CostList(tmp_path).read() == {}


def test_numbers_that_cannot_be_are_not_believed(tmp_path: Path) -> None:
    (tmp_path / COSTS_NAME).write_text('{"aa": [-1, 1, 1, 1], "bb": [NaN, 1, 1, 1], "cc": [0, 0, 0, 0]}')
    learned, _, _ = costs(CostList(tmp_path).read())
    assert all(learned.known(tag, 100, {}).prefill is None for tag in (b"\xaa", b"\xbb", b"\xcc"))


def test_a_file_is_read_as_far_as_there_may_be_namespaces(tmp_path: Path) -> None:
    rows = {f"{n:08x}": [0, 1, 0, 1] for n in range(MAX_NAMESPACES + 3)}
    (tmp_path / COSTS_NAME).write_text(json.dumps(rows))
    found = CostList(tmp_path).read()
    assert [tag.hex() for tag in found] == list(rows)[3:]
