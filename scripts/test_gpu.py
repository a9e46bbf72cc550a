"""`make test-gpu`: what must hold on a GPU, then what it measures there. Needs torch with CUDA, pytest, hypothesis and
what stepwell needs; nothing is installed or downloaded. Where a vLLM for CUDA is importable, its tests run too."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = str(ROOT / "src")
sys.path.insert(0, SOURCE)

from stepwell.bench.gpu import ready  # noqa: E402 - found by what was done above

# Settings of pyproject.toml that need further plugins are left out, if these are not there.
PLAIN = ["-q", "-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]


def main() -> int:
    if error := ready.trouble((*ready.NEEDED, *ready.TESTS)):
        print(error, file=sys.stderr)
        return 2
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))}
    tests = ["tests/gpu"]
    if find_spec("vllm") is not None:
        tests.append("tests/engines/vllm")
    else:
        print("vLLM is not installed for this Python: its own tests are left out")
    commands = [["-m", "pytest", *PLAIN, *tests], ["benchmarks/gpu.py", *sys.argv[1:]]]
    codes = [subprocess.run([sys.executable, *command], cwd=ROOT, env=env).returncode for command in commands]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
