"""`python -m lab.bench`: how fast stepwell is, against what it must reach and against a limit of the same run.

Programs, not a library: each module that `__main__` lists has a `run(quick)` that returns a `report.Result`.

serving    real engines (`demo.engine`): demo, ttft, noreuse, decide, half, validate
compared   real engines, stepwell beside other systems: itl, peers, narrow, repeats, oversize, tierhooks
halves     the vLLM adapter's halves or their clients over a real well: firstspill, lookup, hooks, blockcost
disk       neither: copies, datapath, index, recovery
scale      what one core can do as a well's thread: rates
gpu, longctx have programs of their own

docs/benchmarks.md says what each number means.
"""

from __future__ import annotations
