"""Imports only point down, and what an engine process loads of ours stays light.

The rules themselves are in pyproject.toml (import-linter); here they are run, and checked once more in a real process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE_LIBRARIES = {"torch", "vllm", "transformers", "sglang"}
HEAVY = {"pydantic", "yaml", "cryptography", "xxhash"}


def test_contracts_hold() -> None:
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_is_a_package() -> None:
    """One without `__init__.py` imports just as well, but no contract would see it."""
    sources = ROOT / "src" / "stepwell", ROOT / "lab"
    folders = {path.parent for source in sources for path in source.rglob("*.py")}
    assert folders.issuperset(sources)
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("module", ["stepwell", "stepwell.client", "stepwell.engines.vllm.plugin"])
def test_a_fresh_process_loads_nothing_heavy(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)))
    assert module in loaded
    assert not loaded & (HEAVY | ENGINE_LIBRARIES)


def test_nothing_of_ours_that_the_vllm_adapter_reaches_is_heavy() -> None:
    """Statically, because vLLM loads pydantic itself: at run time nobody could tell who wanted it."""
    graph = grimp.build_graph("stepwell", include_external_packages=True, exclude_type_checking_imports=True)
    start = "stepwell.engines.vllm"
    reached = _reach(graph, {start, *graph.find_descendants(start)})
    assert "stepwell.client" in reached
    heavy = {(module, name) for module in reached for name in graph.find_modules_directly_imported_by(module) & HEAVY}
    assert not heavy


def _reach(graph: grimp.ImportGraph, start: set[str]) -> set[str]:
    """All stepwell modules that importing `start` may load: imports, also within functions, and parent packages."""
    reached: set[str] = set()
    waiting = set(start)
    while waiting:
        module = waiting.pop()
        reached.add(module)
        loads = {module.rpartition(".")[0]} | graph.find_modules_directly_imported_by(module)
        waiting |= {name for name in loads if name.split(".")[0] == "stepwell"} - reached
    return reached
