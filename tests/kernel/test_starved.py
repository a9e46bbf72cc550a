"""No more files, no more memory, another well on the directory."""

from __future__ import annotations

import pytest
from seeds import budget, clean

from stepwell.trust.kills import memory, starved

pytestmark = pytest.mark.kernel


@pytest.mark.skipif(bool(starved.files_why_not()), reason=starved.files_why_not())
def test_a_well_that_may_open_no_more_files_goes_on() -> None:
    assert clean(starved.files(budget(), 0, 2)).n["cases"] == 2


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_a_well_keeps_to_its_memory_and_may_be_killed_for_it() -> None:
    assert clean(starved.limited_memory(budget(), 0, 1)).n["cases"] == 1


def test_a_directory_has_one_well_and_none_after_a_kill() -> None:
    assert clean(starved.two_wells(budget(), 0, 1)).n["cases"] == 1
