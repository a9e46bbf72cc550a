"""The mutation check's table is sound, and what it finds is so: a guard that is missed, one that is not, and a
replacement that is no program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.rig.mutant import replaced
from lab.trust.guards import Guard, Nursery, _survived, table

TESTS = Path(__file__).parents[3] / "tests"
REFUSED = "unit/test_seal.py::test_a_plain_frame_is_refused_where_frames_are_sealed"
GUARD = Guard("plain frames", "stepwell.codecs.seal", ((" or (self._sealed and plain)", ""),), (REFUSED,))
FIRST = "from __future__ import annotations"
HARMLESS = ("_examine(self, page: bytes)", "_examine(self, page: bytes, _: None = None)")


def test_each_entry_of_the_table_can_be_tried() -> None:
    """If this fails: the guard's code has changed. Give guards.toml its present text, or take the entry out with it."""
    assert [why for guard in table() if (why := guard.wrong(TESTS))] == []


def test_names_say_which() -> None:
    names = [guard.name for guard in table()]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("old", ["no such text", "a"])
def test_a_text_is_replaced_where_it_is_there_once(old: str) -> None:
    with pytest.raises(ValueError, match="times, not once"):
        replaced("a = a", [(old, "b")])
    assert replaced("a = b", [("a", "c"), ("b", "d")]) == "c = d"


@pytest.mark.parametrize(
    ("guard", "why"),
    [
        (replace(GUARD, module="stepwell.no.such"), "No module"),
        (replace(GUARD, changes=(("no such text", ""),)), "0 times"),
        (replace(GUARD, changes=((" or (self._sealed and plain)", " or ("),)), "invalid syntax"),
        (replace(GUARD, tests=(f"{REFUSED}_tomorrow",)), "no test is called"),
    ],
    ids=["module", "text", "syntax", "test"],
)
def test_an_entry_that_is_none_any_more_is_told(guard: Guard, why: str) -> None:
    assert why in guard.wrong(TESTS)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(())
    yield made
    made.close()


def test_without_a_mutant_its_tests_pass(nursery: Nursery) -> None:
    outcome = nursery.ask([REFUSED])
    assert (outcome["failed"], outcome["broken"], outcome["passed"]) == ([], [], 1)


@pytest.mark.parametrize(
    ("guard", "why"),
    [
        (GUARD, ""),
        (replace(GUARD, changes=(HARMLESS,)), "no test misses it"),
        (replace(GUARD, changes=(("(self._sealed and plain)", "(self._sealed and plane)"),)), "no program"),
        (
            replace(GUARD, changes=(("from __future__ import annotations", "import no_module_of_that_name"),)),
            "no program",
        ),
        (replace(GUARD, module="stepwell.cli.main", changes=()), "do not load"),
    ],
    ids=["missed", "survives", "a name", "an import", "elsewhere"],
)
def test_a_guard_counts_as_missed_only_if_a_test_fails_for_want_of_it(nursery: Nursery, guard: Guard, why: str) -> None:
    survived = _survived(guard, nursery.ask(guard.tests, guard))
    assert why in survived
    assert bool(survived) is bool(why)
