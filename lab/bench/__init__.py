"""`python -m lab.bench`: how fast stepwell is, against what it must reach and against a limit of the same run.

Programs, not a library: each module `NAME.py` that `__main__` lists has a `run(quick)` that returns a `report.Result`.
`demo`, `ttft`, `noreuse`, `itl`, `decide`, `half`, `validate` and `peers` drive real engines (`demo.engine`);
`firstspill`, `lookup` and `hooks` drive both halves of the vLLM adapter over a real well, with `standin` in the
engine's place; `datapath`, `index` and `recovery` need neither. docs/benchmarks.md says what each number means.
"""

from __future__ import annotations
