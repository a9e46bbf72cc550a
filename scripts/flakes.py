"""`make flakes`: runs every test module many times, alone and beside busy processes, and prints what failed how often.

A test that fails now and then is a fault of the test or of the product; this finds it. One line of JSON is appended to
the results file for each run of a module, so an interrupted campaign goes on where it stopped; runs of another commit
do not count. The exit status is 1 if any run failed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
NOTHING_RAN = 5  # pytest's exit status for a module of which nothing is selected
MODULE_S = 3600
"""A module that takes longer has hung: it is ended, and counts as failed."""


def main() -> int:
    options = parse()
    revision = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True).strip()
    modules = options.modules or sorted(
        str(path.relative_to(ROOT)) for folder in ("tests", "lab/tests") for path in ROOT.glob(f"{folder}/**/test_*.py")
    )
    runs = [run for run in read(options.out) if run["revision"] == revision]
    done = Counter((run["module"], run["busy"]) for run in runs)
    writing = Lock()

    def one(module: str, busy: int) -> None:
        run = {"revision": revision, "module": module, "busy": busy, **attempt(module, options.select)}
        with writing, options.out.open("a") as file:
            file.write(json.dumps(run) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.times):  # every module once, then every module again
            for busy in options.busy:
                with busy_processes(busy):
                    todo = [module for module in modules if done[module, busy] <= number]
                    list(pool.map(one, todo, [busy] * len(todo)))
    return table([run for run in read(options.out) if run["revision"] == revision])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help="test modules; all of them, if none is named")
    parser.add_argument("--times", type=int, default=20, help="runs of each module (20)")
    parser.add_argument(
        "--busy",
        type=int,
        nargs="+",
        default=[0, 2],
        help="processes that keep processors busy meanwhile, in turn (0 2)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="modules that run at the same time (1)")
    parser.add_argument("--select", default="", help="pytest's -m: which tests, 'not e2e and not kernel' for example")
    parser.add_argument("--out", type=Path, default=ROOT / "flakes.jsonl", help="the results file (flakes.jsonl)")
    return parser.parse_args()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def attempt(module: str, select: str) -> dict[str, object]:
    """One run of a module in a process of its own: seconds, and the node ids that failed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", module]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "-m", select] if select else command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=MODULE_S,
        )
    except subprocess.TimeoutExpired:
        return {"seconds": MODULE_S, "failed": [f"{module} (ended after {MODULE_S} s)"], "output": ""}
    failed = sorted(set(FAILED.findall(ended.stdout)))
    if ended.returncode not in (0, NOTHING_RAN) and not failed:
        failed = [f"{module} (exit status {ended.returncode})"]
    output = (ended.stdout + ended.stderr)[-20_000:] if failed else ""
    return {"seconds": round(time.monotonic() - began, 1), "failed": failed, "output": output}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def table(runs: list[dict[str, object]]) -> int:
    """Prints a row for each test that failed; 1 if there is one."""
    times = Counter((run["module"], run["busy"]) for run in runs)
    failed: dict[tuple[str, object, object], int] = defaultdict(int)
    for run in runs:
        for test in run["failed"]:  # type: ignore[attr-defined]
            failed[str(test), run["module"], run["busy"]] += 1
    for (test, module, busy), count in sorted(failed.items(), key=lambda row: -row[1]):
        print(f"{count:3} of {times[module, busy]:3} runs beside {busy} busy processes failed: {test}")
    seconds = sum(float(str(run["seconds"])) for run in runs)
    print(
        f"{len(runs)} runs of {len({run['module'] for run in runs})} modules in {seconds / 60:.0f} minutes "
        f"on {os.cpu_count()} processors: {sum(bool(run['failed']) for run in runs)} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
