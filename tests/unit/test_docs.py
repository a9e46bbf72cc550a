"""Pages for operators name what exists: codes, commands, files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from stepwell.errors import CODES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_codes_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"SW-\d{3}\b", text)) <= CODES.keys()
    for link, heading in re.findall(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)", text):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading[1:] in slugs, heading


def test_troubleshooting_has_each_code_at_one_place() -> None:
    titles = re.findall(r"^### (SW-.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    codes = [code for title in titles for code in re.findall(r"SW-\d{3}", title)]
    assert len(codes) == len(set(codes))
    assert {code[3] for code in codes} == {code[3] for code in CODES}, "each class has an operator's code"
    assert [title.split(",")[0] for title in titles] == sorted(title.split(",")[0] for title in titles)


def test_every_command_that_pages_name_exists() -> None:
    typer = pytest.importorskip("typer")
    from stepwell.cli.commands import app

    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for page in (ROOT / "docs/operations.md", ROOT / "docs/troubleshooting.md", ROOT / "examples/README.md"):
        named = set(re.findall(r"(?:`|bin/|well |^)stepwell ([a-z][a-z-]+)", page.read_text(), re.MULTILINE))
        assert named - {"serves"} <= known, named - known


def test_pages_name_one_port_for_metrics() -> None:
    texts = (*(path.read_text() for path in PAGES), (ROOT / "examples/stepwell.yaml").read_text())
    assert {port for text in texts for port in re.findall(r"127\.0\.0\.1:(9\d{3})\b", text)} == {"9464"}


def test_the_extra_all_holds_every_extra_for_users() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("stepwell[").removesuffix("]").split(","))
    assert named == extras.keys() - {"all", "dev"}


def test_the_reasons_that_the_code_gives_are_those_that_pages_explain() -> None:
    said = "\n".join(path.read_text() for path in (ROOT / "src/stepwell").rglob("*.py"))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = {
        part.partition(":")[0]: re.findall(r"^\| `(\w+)` \|", part.partition("<!-- end -->")[0], re.MULTILINE)
        for part in page.split("<!-- reasons of ")[1:]
    }
    calls = re.findall(r"(?:Obstacle|_cut|_bar)\((.*)\)$", said, re.MULTILINE)
    given = {reason for call in calls for reason in re.findall(r'"(\w+)"', call)} - {"end", "unweighed", "unprobed"}
    given |= set(re.findall(r'"(?:missed|bypassed)_(\w+)"', said))
    missed = {*explained["the well"], *explained["engines"]}
    assert {"pins", "tier_down", "short_prompt", "adapter"} <= given <= missed, given - missed
    for name in missed | {*explained["no spill"]}:
        assert re.search(rf'"(?:missed_|bypassed_)?{name}"', said), f"no code gives the reason {name}"
