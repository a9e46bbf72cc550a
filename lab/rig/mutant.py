"""A pytest plugin that loads one module of stepwell with some text replaced, to see whether the tests notice.

    STEPWELL_MUTANT='{"module": "stepwell.x.y", "changes": [["old", "new"]]}' pytest -p lab.rig.mutant ...

Nothing changes on disk, and processes that the tests start run the module as it is. `STEPWELL_MUTANT_REPORT` names a
file that is told what came of it, as JSON: the tests that failed, and what makes the answer worthless: errors outside
of tests, a module that was never loaded, a replacement that breaks the module rather than the guard in it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MUTANT, REPORT = "STEPWELL_MUTANT", "STEPWELL_MUTANT_REPORT"
"""Names in the environment. Processes that the tests start do not get them."""

BROKEN = (NameError, SyntaxError, ImportError)
"""What a replacement raises that is no program."""


Changes = Sequence[tuple[str, str]]
"""Old texts, and what stands in their places."""


def replaced(source: str, changes: Changes) -> str:
    """Raises ValueError unless each old text is there exactly once."""
    for old, new in changes:
        if (times := source.count(old)) != 1:
            raise ValueError(f"{old!r} is there {times} times, not once")
        source = source.replace(old, new)
    return source


def source_of(module: str) -> Path:
    """Where a module's text lies, without loading it. Raises ImportError if there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module is called {module}")
    return Path(spec.origin)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the changed text; no cache of compiled files is read or written for it."""

    def __init__(self, module: str, path: str, changes: Changes) -> None:
        super().__init__(module, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text(encoding="utf-8")
        return compile(replaced(text, self._changes), self.path, "exec", dont_inherit=True)


@dataclass(slots=True)
class Outcome:
    """`loaded`: the module was, changed. `failed`, `passed`: tests; those that were skipped are neither. `broken`: what
    went wrong outside of a test, or because what stands in the old text's place is no program."""

    loaded: bool = False
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, changes: Changes, outcome: Outcome) -> None:
        self._module, self._changes, self._outcome = module, changes, outcome

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return None
        self._outcome.loaded = True
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=_Loader(fullname, found.origin, self._changes)
        )


class _Plugin:
    def __init__(self, outcome: Outcome, report: Path | None) -> None:
        self._outcome, self._report = outcome, report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcome.passed += report.when == "call" and report.passed

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[object], report: object) -> None:
        raised = call.excinfo.value if call.excinfo is not None else None
        if call.when == "collect" or isinstance(raised, BROKEN):
            self._outcome.broken.append(f"{node.nodeid}: {type(raised).__name__} in {call.when}: {raised}"[:300])
        else:
            self._outcome.failed.append(node.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (0, 1):  # no such test, none at all, or pytest itself
            self._outcome.broken.append(f"pytest ended with {int(exitstatus)}")
        if self._report is not None:
            text = {name: getattr(self._outcome, name) for name in Outcome.__slots__}
            self._report.write_text(json.dumps(text), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    report = os.environ.pop(REPORT, None)
    outcome = Outcome()
    if (wanted := os.environ.pop(MUTANT, None)) is not None:
        mutant = json.loads(wanted)
        if mutant["module"] in sys.modules:
            raise RuntimeError(f"{mutant['module']} was loaded before it could be changed")
        sys.meta_path.insert(0, _Finder(mutant["module"], mutant["changes"], outcome))
    config.pluginmanager.register(_Plugin(outcome, Path(report) if report else None), "stepwell-mutant-outcome")
