"""`python -m lab.bench [NAME ...] [--systems A,B] [--quick] [--out DIR]`: benchmarks, printed and kept.

One after the other, in one process, each with wells and engines of its own. A target that is missed is printed and
kept, and is no failure of the run; a benchmark that cannot run is one.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.bench.each import each
from lab.bench.processes import end_orderly
from lab.bench.report import Result

FOLDERS = {
    "demo": "serving",
    "copies": "disk",
    "datapath": "disk",
    "readwrite": "disk",
    "stream": "streams",
    "lookup": "halves",
    "blockcost": "halves",
    "rates": "scale",
    "tails": "scale",
    "hooks": "halves",
    "firstspill": "halves",
    "ttft": "serving",
    "noreuse": "serving",
    "index": "disk",
    "recovery": "disk",
    "itl": "compared",
    "decide": "serving",
    "half": "serving",
    "validate": "serving",
    "peers": "compared",
    "narrow": "compared",
    "repeats": "compared",
    "oversize": "compared",
    "windows": "compared",
    "tierhooks": "compared",
    "drafters": "speculation",
}
"""The folder of each benchmark, in the order in which all are run."""
NAMES = tuple(FOLDERS)
BETWEEN_SYSTEMS = ("itl", "peers", "narrow", "repeats")
RESULTS = Path("benchmarks/results")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    if options.systems and (other := [name for name in names if name not in BETWEEN_SYSTEMS]):
        parser.error(f"{other[0]} does not compare systems; {', '.join(BETWEEN_SYSTEMS)} do")
    chosen = {"names": options.systems.split(",")} if options.systems else {}
    out: Path | None = options.out or (None if options.quick else RESULTS)
    switches = [*(["--systems", options.systems] if options.systems else []), *(["--quick"] if options.quick else [])]
    command = " ".join(["python -m lab.bench", *options.names, *switches])
    complete = each(
        {name: partial(_run, name, options.quick, chosen) for name in names},
        out=out,
        command=command,
        quick=options.quick,
    )
    return 0 if complete else 1


def _run(name: str, quick: bool, chosen: dict[str, list[str]]) -> Result:
    found: Result = importlib.import_module(f"lab.bench.{FOLDERS[name]}.{name}").run(quick, **chosen)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.bench", description="stepwell's benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--quick", action="store_true", help="a few samples: shows that it runs, measures nothing")
    parser.add_argument(
        "--systems", metavar="A,B,...", help=f"for {', '.join(BETWEEN_SYSTEMS)}: the systems to run; all"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"where results are kept ({RESULTS}; with --quick nowhere)"
    )
    return parser


if __name__ == "__main__":
    end_orderly()
    raise SystemExit(main())
