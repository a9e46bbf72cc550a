"""Measures stepwell on this machine's GPU, in some five minutes: `python benchmarks/gpu.py`. Needs torch with CUDA and
what stepwell needs, no installation. docs/benchmarks.md says what each number means.

Without a GPU it says so, and ends with status 2. `--device cpu` runs all of it in a tiny shape, to see that it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / "src"), str(ROOT)]
sys.path[:0] = SOURCES
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")]))  # for the well

from lab.bench.gpu import ready  # noqa: E402 - found by what was done above

SECONDS = 290


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description="stepwell's measurements on a GPU")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of copies, interference, recall; all")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats; kept only with --out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny shape, no measurement")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results are kept (benchmarks/results)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="where the disk tier is (the temporary folder)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="nothing is begun after that (%(default)s)")
    options = parser.parse_args()
    if error := ready.trouble(gpu=options.device == "cuda"):
        print(error, file=sys.stderr)
        return 2
    from lab.bench.gpu import run
    from lab.bench.gpu.stage import Stage
    from lab.bench.processes import end_orderly

    end_orderly()
    names = options.names or run.NAMES
    if unknown := [name for name in names if name not in run.NAMES]:
        parser.error(f"nothing is called {unknown[0]}; there are {', '.join(run.NAMES)}")
    kept = options.out or (ROOT / "benchmarks/results" if options.device == "cuda" and not options.quick else None)
    switches = ["--quick"] * options.quick + ["--device", "cpu"] * (options.device == "cpu")
    command = " ".join(["python benchmarks/gpu.py", *options.names, *switches])
    stage = Stage(options.device, options.quick, time.monotonic() + options.seconds)
    _, complete = run.run(names, stage, out=kept, disk=options.disk, command=command)
    return 0 if complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
