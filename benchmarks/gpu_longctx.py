"""Measures decoding across tiers on this machine's GPU: `python benchmarks/gpu_longctx.py`. Needs torch with CUDA,
transformers and what stepwell needs, no installation. docs/benchmarks.md says what each number means.

Without a GPU it says so, and ends with status 2. `--device cpu` runs all of it in a tiny shape, to see that it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from lab.bench.gpu import ready  # noqa: E402 - found by what was done above

SECONDS = 200.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_longctx.py", description="decoding across tiers on a GPU")
    parser.add_argument("--shape", choices=("llama-8b", "tiny"), help="llama-8b; without a GPU tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: no measurement")
    parser.add_argument("--quick", action="store_true", help="fewer steps, one context; kept only with --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results are kept (benchmarks/results)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="nothing is begun after that (%(default)s)")
    options = parser.parse_args()
    if error := ready.trouble((*ready.NEEDED, *ready.MODELS), gpu=options.device == "cuda"):
        print(error, file=sys.stderr)
        return 2
    from lab import FOLDER
    from lab.bench import report
    from lab.bench.gpu import card
    from lab.bench.longctx.gpu import run as gpu
    from lab.bench.longctx.stage import Stage
    from stepwell.errors import StepwellError
    from stepwell.ops import machine

    shape = options.shape or ("llama-8b" if options.device == "cuda" else "tiny")
    tiny = options.device == "cpu" or shape == "tiny"
    kept = options.out or (None if tiny or options.quick else ROOT / "benchmarks/results")
    contexts = gpu.CONTEXTS[shape][: 1 if options.quick else None]
    facts, began = machine.facts(FOLDER), time.monotonic()
    try:
        result = gpu.run(Stage.begin(options.quick, kept, options.seconds), options.device, shape, contexts)
    except StepwellError as error:
        print(error, file=sys.stderr)
        return 1
    facts["gpu"] = card.facts()
    facts["seconds"] = round(time.monotonic() - began, 1)
    facts["load_average_after"] = machine.load_average()
    print(report.table(result), flush=True)
    if kept is not None:
        command = f"python benchmarks/gpu_longctx.py --shape {shape} --device {options.device}"
        print(f"  kept in {report.save(result, kept, facts, command=command, quick=options.quick or tiny)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
