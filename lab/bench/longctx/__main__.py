"""`python -m lab.bench.longctx [NAME ...] [--quick] [--out DIR]`: as `python -m lab.bench`, on decoding
across tiers. One after the other in one process; each ends within eight minutes, whatever it has done by then."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.bench.each import each
from lab.bench.longctx.stage import QUICK_SECONDS, SECONDS, Stage
from lab.bench.report import Result

MODULES = {
    **{name: name for name in ("exact", "overhead", "pipeline", "verified", "beyond")},
    **{name: f"anchors.{name}" for name in ("hits", "predicted", "near")},
}
NAMES = tuple(MODULES)
RESULTS = Path("benchmarks/results")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.longctx", description="decoding across tiers: stepwell's benchmarks"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--quick", action="store_true", help="a few samples: shows that it runs, measures nothing")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"where results are kept ({RESULTS}; with --quick nowhere)"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"nothing is begun after that ({SECONDS:g}; with --quick {QUICK_SECONDS:g})"
    )
    options = parser.parse_args(arguments)
    names = options.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    out: Path | None = options.out or (None if options.quick else RESULTS)
    switches = ["--quick"] if options.quick else []
    complete = each(
        {name: partial(_run, name, options.quick, out, options.seconds) for name in names},
        out=out,
        command=" ".join(["python -m lab.bench.longctx", *options.names, *switches]),
        quick=options.quick,
    )
    return 0 if complete else 1


def _run(name: str, quick: bool, out: Path | None, seconds: float | None) -> Result:
    module = importlib.import_module(f"lab.bench.longctx.{MODULES[name]}")
    found: Result = module.run(Stage.begin(quick, out, seconds))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
