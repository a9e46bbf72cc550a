"""Every error has a known code of its class, one line, and its row in docs/errors.md."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from stepwell import errors
from stepwell.errors import CODES, ConfigError, IntegrityError, StepwellError

ROOT = Path(__file__).parents[2]
PARTS = {"what": "w", "why": "y", "fix": "f"}


def test_a_message_is_one_line_with_all_parts() -> None:
    error = ConfigError("SW-101", what="a\nb", why="because", fix="do  that")
    assert str(error) == "what: a b why: because fix: do that [SW-101]"
    assert (error.code, error.what, error.why, error.fix) == ("SW-101", "a\nb", "because", "do  that")


def test_an_error_survives_being_copied_between_processes() -> None:
    error = copy.copy(IntegrityError("SW-302", **PARTS))
    assert type(error) is IntegrityError
    assert str(error) == "what: w why: y fix: f [SW-302]"


@pytest.mark.parametrize("code", ["SW-199", "SW-302", "101", "SW-1"])
def test_a_code_that_is_unknown_or_of_another_class_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="is not a code of ConfigError") as caught:
        ConfigError(code, **PARTS)
    assert not isinstance(caught.value, StepwellError)


def test_the_base_class_has_no_codes() -> None:
    with pytest.raises(ValueError, match="subclasses"):
        StepwellError("SW-101", **PARTS)


def test_a_code_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="SW-101 is given to two meanings"):
        errors._table(("SW-101", "one"), ("SW-101", "other"))


def test_each_code_belongs_to_one_class() -> None:
    families = [kind.family for kind in StepwellError.__subclasses__()]
    assert sorted(families) == sorted(set(families))
    assert {code[3] for code in CODES} == set(families)
    assert all(re.fullmatch(r"SW-[1-9]\d\d", code) for code in CODES)


def test_the_documentation_lists_exactly_these_codes() -> None:
    rows = re.findall(r"^\| (SW-\d+) \| (.+) \|$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert rows == list(CODES.items())


def test_every_code_in_the_source_is_known() -> None:
    """A raise site that no test reaches must not fail with the wrong error."""
    used = {code for file in (ROOT / "src").rglob("*.py") for code in re.findall(r"SW-\d{3}\b", file.read_text())}
    assert "SW-101" in used
    assert used <= CODES.keys()
