"""Slabs in a worker's process: who keeps them mapped, in what order they come and go, what a driver may do to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.block.layout import SlabLayout
from stepwell.client.slabs import Hold, Key, Slabs
from stepwell.errors import CapacityError, IntegrityError, StepwellError
from stepwell.io.memory import Bytes, SharedMemory
from stepwell.protocol import messages as m

LAYOUT = SlabLayout(4096, 2)
GENERATION = 5


class Bench:
    """Slabs over one piece of memory. The mapping thread's jobs run when the test says so; a driver writes down what it
    is asked, and fails when told to."""

    def __init__(self, *, driver: bool = True) -> None:
        self.memory = SharedMemory(LAYOUT.nbytes)
        self.memory.bytes[: 8 * LAYOUT.slots].view(np.uint64)[:] = GENERATION
        self.jobs: list[Callable[[], None]] = []
        self.said: list[tuple[str, Key]] = []
        self.troubles: list[StepwellError] = []
        self.registered: dict[int, Bytes] = {}
        self.refuses: Exception | None = None
        self.keeps: Exception | None = None
        self.during: Callable[[], None] = lambda: None  # what happens while the driver works
        self.slabs = Slabs(
            4096,
            do=self.jobs.append,
            mapped=lambda key: self.said.append(("mapped", key)),
            gone=lambda key: self.said.append(("gone", key)),
            trouble=self.troubles.append,
            prepare=self._register if driver else None,
        )

    def _register(self, whole: Bytes) -> Callable[[], None]:
        self.during()
        if self.refuses is not None:
            raise self.refuses
        assert len(whole) == LAYOUT.nbytes
        number = len(self.said) + 1000 * len(self.registered)
        self.registered[number] = whole
        return lambda: self._unregister(number)

    def _unregister(self, number: int) -> None:
        self.during()
        if self.keeps is not None:
            raise self.keeps
        self.registered.pop(number)[:1].copy()  # a fault if it is unmapped already

    def come(self, key: Key, *, work: bool = True) -> None:
        shared = m.SlabShared(key[1], LAYOUT.nbytes, LAYOUT.offset, LAYOUT.stride, LAYOUT.slots)
        self.slabs.come(key, shared, os.dup(self.memory.fd))
        if work:
            self.work()

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.memory.close()


def test_a_retired_slab_waits_for_its_holds_and_keeps_no_other_waiting(bench: Bench) -> None:
    bench.come((7, 1))
    bench.come((7, 2))
    hold = bench.slabs.hold()
    view = hold.slot(7, 1, 0, GENERATION).bytes
    bench.slabs.retire((7, 1))
    bench.slabs.retire((7, 2))
    bench.come((7, 3))
    assert bench.said == [("mapped", (7, 1)), ("mapped", (7, 2)), ("gone", (7, 2)), ("mapped", (7, 3))]
    assert not view.any(), "it can still be read"
    for late in (hold, bench.slabs.hold()):
        with pytest.raises(IntegrityError):
            late.slot(7, 1, 0, GENERATION)
    with pytest.raises(IntegrityError):
        bench.slabs.verify((7, 1), 0, GENERATION)
    hold.slot(7, 3, 1, GENERATION)
    del view
    hold.close()
    bench.work()
    assert bench.said[4:] == [("gone", (7, 1))] and bench.slabs.mapped == 1


def test_a_slab_is_unmapped_when_the_last_of_its_holds_is_closed(bench: Bench) -> None:
    bench.come((7, 1))
    holds = [bench.slabs.hold() for _ in range(3)]
    for hold in holds:
        for slot in (0, 1, 0):
            hold.slot(7, 1, slot, GENERATION)
    bench.slabs.retire((7, 1))
    for hold in holds:
        assert bench.slabs.mapped == 1
        hold.close()
        hold.close()
        bench.work()
    assert bench.said[-1] == ("gone", (7, 1)) and not bench.slabs.mapped and not bench.registered
    bench.come((7, 2))
    with pytest.raises(IntegrityError, match="ended"):
        holds[0].slot(7, 2, 0, GENERATION)


def test_prepared_before_it_is_told_and_undone_before_it_is_unmapped(bench: Bench) -> None:
    told_while_working: list[bool] = []
    bench.during = lambda: told_while_working.append(bool(bench.said))
    bench.come((7, 1))
    assert told_while_working == [False] and len(bench.registered) == 1
    bench.slabs.retire((7, 1))
    assert bench.registered and bench.jobs, "it is the mapping thread that undoes"
    bench.work()
    assert not bench.registered and bench.slabs.empty and bench.said[-1] == ("gone", (7, 1))


def test_retired_while_it_is_being_prepared(bench: Bench) -> None:
    bench.during = lambda: bench.slabs.retire((7, 1)) if not bench.registered else None
    bench.come((7, 1))
    assert bench.said == [("gone", (7, 1))] and not bench.registered and bench.slabs.empty
    bench.during = lambda: None
    bench.come((7, 2), work=False)
    bench.slabs.retire((7, 2))
    bench.work()
    assert bench.said == [("gone", (7, 1)), ("gone", (7, 2))], "neither was ever told as mapped"


def test_retired_while_another_is_being_prepared(bench: Bench) -> None:
    bench.come((7, 1))
    bench.during = lambda: bench.slabs.retire((7, 1)) if len(bench.said) == 1 else None
    bench.come((7, 2))
    assert bench.said == [("mapped", (7, 1)), ("mapped", (7, 2)), ("gone", (7, 1))] and bench.slabs.mapped == 1


REFUSALS = [
    RuntimeError("CUDA"),
    AttributeError("no such symbol"),
    OSError(12, "no memory"),
    CapacityError("SW-202", what="w", why="y", fix="f"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_what_cannot_be_prepared_is_not_told_as_mapped(bench: Bench, refusal: Exception) -> None:
    bench.refuses = refusal
    bench.come((7, 1))
    (told,) = bench.troubles
    assert (
        told is refusal if isinstance(refusal, StepwellError) else (told.code == "SW-202" and str(refusal) in told.why)
    )
    assert not bench.said and bench.slabs.empty and not bench.slabs.mapped
    bench.slabs.retire((7, 1))
    assert bench.said == [("gone", (7, 1))], "whoever waits for it waits no longer"


def test_what_cannot_be_undone_stays_mapped_and_is_told(bench: Bench) -> None:
    bench.come((7, 1))
    bench.keeps = RuntimeError("it is gone")
    bench.slabs.retire((7, 1))
    bench.work()
    (told,) = bench.troubles
    assert told.code == "SW-206" and "it is gone" in told.why
    assert bench.said == [("mapped", (7, 1))], "it is never told as gone"
    (whole,) = bench.registered.values()
    whole[:] = 1  # still mapped
    assert bench.slabs.leaked == {(7, 1)} and bench.slabs.empty and not bench.slabs.mapped
    bench.slabs.retire_all()
    bench.work()
    assert len(bench.troubles) == 1, "it is undone once"


def test_nothing_comes_after_the_end(bench: Bench) -> None:
    bench.come((7, 1))
    bench.slabs.retire_all(closed=True)
    bench.work()
    fds = len(os.listdir("/proc/self/fd"))
    bench.come((7, 2))
    assert len(os.listdir("/proc/self/fd")) == fds
    assert bench.slabs.empty and ("mapped", (7, 2)) not in bench.said


class Lives(RuleBasedStateMachine):
    """Slabs come and go, holds are taken and closed, the mapping thread gets round to its jobs now and then, and the
    driver refuses some."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.number = 0
        self.retired: set[Key] = set()
        self.holds: dict[Hold, set[Key]] = {}

    @property
    def told(self) -> set[Key]:
        return {key for what, key in self.bench.said if what == "mapped"}

    @property
    def gone(self) -> set[Key]:
        return {key for what, key in self.bench.said if what == "gone"}

    @rule(refuse=st.booleans())
    def come(self, refuse: bool) -> None:
        self.number += 1
        self.bench.come((7, self.number), work=False)
        if refuse:
            self.bench.refuses = RuntimeError("no")
            self.bench.work()
            self.bench.refuses = None

    @precondition(lambda self: self.bench.jobs)
    @rule()
    def work(self) -> None:
        self.bench.jobs.pop(0)()

    @rule(number=st.integers(1, 20))
    def retire(self, number: int) -> None:
        if number <= self.number and (7, number) not in self.retired:
            self.retired.add((7, number))
            self.bench.slabs.retire((7, number))

    @rule()
    def lose(self) -> None:
        present = {(7, n) for n in range(1, self.number + 1)} - self.retired
        self.bench.slabs.retire_all()
        self.retired |= present

    @precondition(lambda self: len(self.holds) < 5)
    @rule()
    def hold(self) -> None:
        self.holds[self.bench.slabs.hold()] = set()

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), number=st.integers(1, 20))
    def take(self, data: st.DataObject, number: int) -> None:
        hold = data.draw(st.sampled_from(list(self.holds)))
        key = (7, number)
        may = key in self.told and key not in self.retired
        with contextlib.nullcontext() if may else pytest.raises(IntegrityError):
            slot = hold.slot(7, number, 0, GENERATION)
            assert len(slot.bytes) == 4096
            self.holds[hold].add(key)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(list(self.holds)))
        del self.holds[hold]
        hold.close()

    @invariant()
    def held_slabs_are_here(self) -> None:
        held = {key for keys in self.holds.values() for key in keys}
        assert not held & self.gone
        assert len(self.bench.registered) == self.bench.slabs.mapped
        assert len(self.gone) == sum(what == "gone" for what, _ in self.bench.said), "each is told once"

    def teardown(self) -> None:
        for hold in self.holds:
            hold.close()
        self.bench.slabs.retire_all(closed=True)
        self.bench.work()
        assert self.bench.slabs.empty and not self.bench.registered and not self.bench.troubles[self.number :]
        assert self.told <= self.gone
        self.bench.memory.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
