"""The ratchet: numbers of the code that may only fall."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ratchet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a repository with one measure."""
    spec = importlib.util.spec_from_file_location("ratchet", ROOT / "scripts/ratchet.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    return script


def judged(script: ModuleType, name: str, today: int, limit: int) -> int:
    script.MEASURES = {name: ("a number", lambda: today)}
    settings = f"[tool.stepwell.ratchet]\nlimits.{name} = {limit}\ntargets.{name} = 0\n"
    (script.ROOT / "pyproject.toml").write_text(settings)
    status: int = script.main()
    return status


def test_what_is_over_its_limit_fails(ratchet: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(ratchet, "rings", 4, 4) == 0
    assert judged(ratchet, "rings", 5, 4) == 1
    assert "over the limit of 4" in capsys.readouterr().err


def test_what_has_fallen_is_kept(ratchet: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(ratchet, "rings", 3, 4) == 1
    assert 'write "rings = 3"' in capsys.readouterr().err
    assert judged(ratchet, "all_lines", 990, 1000) == 0, "lines change with every commit"
    assert judged(ratchet, "all_lines", 900, 1000) == 1


def test_each_measure_has_a_limit_and_a_target(ratchet: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    ratchet.MEASURES = {}
    (ratchet.ROOT / "pyproject.toml").write_text("[tool.stepwell.ratchet]\nlimits.rings = 4\ntargets.rings = 0\n")
    assert ratchet.main() == 1
    assert "a limit and a target" in capsys.readouterr().out


def test_what_is_counted(ratchet: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "stepwell"
    for name, text in {
        "hierarchy/a.py": "class Same:\n    x: Callable[[], int]\n",
        "client/b.py": "class Same: ...\nclass _Own: ...\n" + "\n" * 400,
        "client/c.py": "class _Own: ...\n",
        "../../lab/d.py": "class Same: ...\n" + "\n" * 500,
        "../../lab/tests/e.py": "\n" * 7,
        "../../tests/f.py": "\n" * 2,
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    for number in range(13):
        (source / "client" / f"n{number}.py").touch()
    monkeypatch.setattr(ratchet, "SOURCE", source)
    monkeypatch.setattr(ratchet, "LAB", tmp_path / "lab")
    monkeypatch.setattr(ratchet, "ROOT", tmp_path)
    assert ratchet.names_used_twice() == 1, "private ones and those of the lab are not counted"
    assert ratchet.long_files() == 1
    assert ratchet.full_folders() == 1
    assert ratchet.callables_in_hierarchy() == 1
    assert ratchet.package_lines() == 2 + 402 + 1
    assert ratchet.core_lines() == 2 + 402 + 1
    assert ratchet.lab_lines() == 501
    assert ratchet.test_lines() == 7 + 2, "those of the lab too"
