"""What commands say to a person: which words, on which stream, and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.cli.group import SECTIONS
from stepwell.cli.main import _missing
from stepwell.cli.output import removed_table, uninstall_table
from stepwell.errors import StepwellError
from stepwell.ops.uninstall import LeftFile, LeftFolder, Removed


def test_what_is_missing_is_installed_from_a_clone() -> None:
    assert "in a clone of stepwell: pip install '.[cli]'" in _missing(ImportError(name="typer")).fix


def test_flags_for_a_larger_machine_are_printed_with_a_warning() -> None:
    done = CliRunner().invoke(app, ["vllm-args", "--host", "99999TiB"])
    assert done.exit_code == 0
    assert '"host":"99999TiB"' in done.stdout and "SW-106" not in done.stdout
    assert "not on this machine" in done.stderr and "SW-106" in done.stderr


@pytest.mark.parametrize(("option", "value"), [("--disk", "here:1GiB"), ("--host", "much")])
def test_an_error_in_an_option_names_the_option(tmp_path: Path, option: str, value: str) -> None:
    error = CliRunner().invoke(app, ["serve", "--home", str(tmp_path / "home"), option, value]).exception
    assert isinstance(error, StepwellError)
    assert error.what.startswith(f"{option}: ")


def test_what_would_be_deleted_is_counted_in_words() -> None:
    home = LeftFolder("home", Path("/h"), (LeftFile("keyring", 4096),), ("notes",))
    disk = LeftFolder("data", Path("/d"), tuple(LeftFile(str(n), 4096) for n in range(3)), ())
    demo = LeftFolder("demo", Path("/c"), (LeftFile("models", 1 << 30),), ())
    said = uninstall_table([disk, home, demo])
    assert "3 files, 12KiB, in /d (blocks on disk)" in said
    assert "1 file, 4KiB, in /h (home: " in said and "1 folder, 1GiB, in /c" in said
    assert "deleted 2 folders, 0B, in /c" in removed_table([Removed("demo", Path("/c"), ("a", "b"), 0, ())])


def commands() -> dict[str, typer.core.TyperCommand]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def test_help_lists_each_command_once_under_what_it_is_for() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(commands())
    lines = [line.split() for line in shown.splitlines()]
    assert all(any(line[:1] == [name] for line in lines) for name in commands())
    assert "...\n" not in shown.partition("Options:")[2], "a first sentence is too long for its line"
    for group in ("cache", "config"):
        assert "...\n" not in CliRunner().invoke(app, [group, "--help"]).stdout.partition("Options:")[2]


@pytest.mark.parametrize(
    ("old", "new"),
    [("clear", "cache clear"), ("namespaces", "cache namespaces"), ("fsck", "cache fsck"),
     ("bench fidelity", "fidelity"), ("bench indexes", "indexes")],
)  # fmt: skip
def test_an_old_spelling_is_the_new_command_and_says_so(old: str, new: str) -> None:
    told = CliRunner().invoke(app, [*old.split(), "--help"])
    assert (
        told.exit_code == 0
        and told.stdout.splitlines()[2:] == (CliRunner().invoke(app, [*new.split(), "--help"]).stdout.splitlines()[2:])
    )
    assert "the old spelling goes with the next version" in told.stderr
    assert "old spelling" not in CliRunner().invoke(app, [*new.split(), "--help"]).stderr


@pytest.mark.parametrize("rest", ["", "--help", "stop", "config check", "uninstall --yes", "bench fidelity"])
def test_other_benchmarks_are_no_command_and_it_says_how_they_run(rest: str) -> None:
    told = CliRunner().invoke(app, ["bench", *rest.split()])
    assert told.exit_code == 2 and not told.stdout
    assert "python -m lab.bench" in told.stderr and "stepwell fidelity" in " ".join(told.stderr.split())
