"""`python -m lab.sim --seed N [--steps K] [--cuts K] [--traffic] [--tell]`: walks of a seed, exactly as
they were.

Prints what was reached and, where a promise does not hold, which one and how; then it exits with 1. `--tell` prints
every event. Without `--seed` it walks on with new seeds until one fails, or `--walks` are done.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections.abc import Sequence

from lab.sim.walk import STEPS, walk


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.sim", description="deterministic simulation")
    parser.add_argument("--seed", type=int, help="of the walk; else new ones")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each walk ({STEPS})")
    parser.add_argument("--cuts", type=int, default=0, help="states after power cuts that are opened on the way (0)")
    parser.add_argument("--traffic", action="store_true", help="tiers hang while requests come all the time")
    parser.add_argument("--pauses", action="store_true", help="an operator pauses and resumes recalls and spills")
    parser.add_argument("--remote", action="store_true", help="a tier that others share lies below the disk")
    parser.add_argument("--groups", action="store_true", help="some engines have a model with several cache groups")
    parser.add_argument("--walks", type=int, default=1, help="how many, if no seed is given (1)")
    parser.add_argument("--tell", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    seeds = [options.seed] if options.seed is not None else [random.randrange(1 << 32) for _ in range(options.walks)]
    for seed in seeds:
        walked = walk(
            seed,
            options.steps,
            cuts=options.cuts,
            traffic=options.traffic,
            pauses=options.pauses,
            remote=options.remote,
            groups=options.groups,
            tell=print if options.tell else None,
        )
        print(
            f"seed {seed}: {walked.events} events, {walked.requests} requests, {walked.right} blocks right, "
            f"{walked.states} states, {walked.digest}"
        )
        if len(seeds) == 1:
            print(" ".join(f"{what}={n}" for what, n in sorted(walked.seen.items())))
        if walked.violation is not None:
            print(f"BROKEN {walked.violation}")
            if walked.violation.__cause__ is not None:
                traceback.print_exception(walked.violation.__cause__)
            how = f"--steps {options.steps} --cuts {options.cuts}"
            how += " --traffic" * options.traffic + " --pauses" * options.pauses + " --remote" * options.remote
            how += " --groups" * options.groups
            print(f"again: python -m lab.sim --seed {seed} {how}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
