"""`python -m lab.sim.turns`: a table of what recalls wait under each order of service, at several loads.

Sizes and times are those of made traces: all that an earlier request had asked for is recalled from one tier. Waits are
in multiples of what the mean recall takes alone, slowdowns in multiples of what each takes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lab.sim.turns.line import BATCH, ORDERS, waits
from stepwell.simulate import generator
from stepwell.simulate.formats.form import TraceOptions
from stepwell.simulate.traces.problems import Problems

TOKEN_BYTES = 8192  # batches are as large beside recalls as with 128 KiB a token and batches of 128 MiB
IDLE_S = 60.0
"""A conversation whose last turn is longer ago than this has left host memory."""

RECALLS = 1500
LOADS = 0.3, 0.6, 0.8, 0.95

Arrivals = list[tuple[float, int]]


def recalls(source: str) -> Arrivals:
    """The first of a made trace."""
    trace = generator.make(source, TraceOptions(block_tokens=512), Problems(source))
    last: dict[int, float] = {}
    found: Arrivals = []
    for at, session, tokens in zip(
        trace.times.tolist(), trace.sessions.tolist(), trace.ceiling().tolist(), strict=True
    ):
        if tokens and (session < 0 or at - last.get(session, -math.inf) > IDLE_S):
            found.append((at, tokens * TOKEN_BYTES))
        last[session] = at
    return found[:RECALLS]


def together(sizes: Sequence[int], every: float, times: int) -> Arrivals:
    """Recalls of these sizes come at once, again and again."""
    return [(n * every, size) for n in range(times) for size in sizes]


def table(label: str, arrivals: Arrivals, load: float, room: float = math.inf) -> None:
    """`load`: of the tier, from the first arrival to the last. `room`: mean recalls in line at a time."""
    sizes = np.array([size for _, size in arrivals], float)
    byte_s = load * (arrivals[-1][0] - arrivals[0][0]) / sizes.sum()
    print(f"\n{label}, load {load:g}" + (f", room for {room:g}" if room < math.inf else ""))
    print(f"{'':16}{'wait':>8}{'p50':>8}{'p95':>8}{'slowdown':>10}{'p50':>8}{'p95':>8}{'worst':>8}{'later':>8}")
    first = None
    for name, kind in ORDERS.items():
        took = waits(arrivals, kind(), byte_s, 2 * BATCH, room * float(sizes.mean()))
        first = took if first is None else first
        slower = took / (sizes * byte_s)
        wait = took / (sizes.mean() * byte_s)
        figures = [wait.mean(), *np.percentile(wait, (50, 95)), slower.mean(), *np.percentile(slower, (50, 95, 100))]
        cells = "".join(f"{figure:{10 if at == 3 else 8}.2f}" for at, figure in enumerate(figures))
        print(f"{name:16}{cells}{np.mean(took > 1.01 * first):8.1%}")


def main() -> None:
    documents = recalls("zipf:seed=1,requests=2000")
    agents = recalls("agentic:seed=1,conversations=100,open=20")
    for load in LOADS:
        table("documents", documents, load)
        table("coding agents", agents[:1000], load)
    for room in (1.5, 3.0, 8.0):
        table("documents", documents, 0.8, room)
    mib = 1 << 20
    table("8 of 256 MiB together", together([256 * mib] * 8, 1.0, 100), 0.8)
    table("1 of 2 GiB and 7 of 64 MiB together", together([2048 * mib] + [64 * mib] * 7, 1.0, 100), 0.8)


if __name__ == "__main__":
    main()
