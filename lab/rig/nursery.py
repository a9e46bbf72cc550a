"""`python -m lab.rig.nursery [MODULE ...]`: a process that has loaded what tests take long to load, and runs
each set of tests in a fork of itself, which has loaded nothing of stepwell yet.

    in, a line each      {"tests": [...], "seconds": 60, "mutant": {"module": ..., "changes": [...]} or null}
    out, a line each     what `lab.rig.mutant` reports, or {"broken": ["why"]}; see `Outcome`
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.rig import mutant

ALWAYS = ("pytest", "hypothesis", "numpy", "blake3", "msgspec", "pydantic", "pydantic.dataclasses", "pydantic.fields",
          "typer.testing", "xxhash", "yaml", "hmac", "mmap", "resource", "cryptography.hazmat.primitives.ciphers.aead",
          "cryptography.hazmat.primitives.kdf.hkdf", "anyio.pytest_plugin", "pytest_timeout", "xdist.looponfail",
          "xdist.plugin", "_hypothesis_pytestplugin")  # fmt: skip
"""What most tests load, and the plugins that pytest finds."""

_OWN = {"stepwell", "stepwell.testing", "lab.rig.mutant", "lab.rig.nursery"}


def main() -> None:
    for name in (*ALWAYS, *sys.argv[1:]):
        with contextlib.suppress(ImportError):  # tests that need it say so
            importlib.import_module(name)
    if early := [name for name in sys.modules if name.partition(".")[0] == "stepwell" and name not in _OWN]:
        raise RuntimeError(f"{early[0]} is loaded before any test could change it")
    import pytest

    gc.freeze()  # a fork's collector leaves alone, and so shares, what is there by now
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line), pytest.main)), file=answers, flush=True)


def _run(request: dict[str, Any], pytest_main: Callable[[list[str]], int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stepwell-trust-") as folder:
        report, said = Path(folder) / "report.json", Path(folder) / "said"
        pid = os.fork()
        if pid == 0:
            _child(request, report, said, pytest_main)
        if not _ended(pid, request["seconds"]):
            return {"loaded": True, "broken": [], "failed": [f"no end after {request['seconds']} s"], "passed": 0}
        if not report.exists():
            return {"loaded": False, "broken": [f"no report: {said.read_text()[-300:]}"], "failed": [], "passed": 0}
        outcome: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return outcome


def _child(request: dict[str, Any], report: Path, said: Path, pytest_main: Callable[[list[str]], int]) -> None:
    code = 70
    try:
        os.setsid()
        out = os.open(said, os.O_WRONLY | os.O_CREAT, 0o600)
        for fd in (1, 2):
            os.dup2(out, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[mutant.REPORT] = str(report)
        if request["mutant"] is not None:
            os.environ[mutant.MUTANT] = json.dumps(request["mutant"])
        options = ["-p", mutant.__name__, "-p", "no:cacheprovider", "-x", "--hypothesis-profile", "mutants"]
        code = pytest_main([*options, *request["tests"]])
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(pid: int, seconds: float) -> bool:
    """Whether it did in time; if not it is killed, with all that it started."""
    pidfd = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return in_time


if __name__ == "__main__":
    main()
