"""`peers` with less host memory in front of the disk than two documents have, one request at a time.

With so little, vLLM's tiering recomputes most of what comes together: that would be no comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lab.bench.compared.peers import FULL, QUICK, measured
from lab.bench.compared.systems import DISK, LIMIT, VLLM_FS
from lab.bench.report import Result
from stepwell.demo.well import MIB

HOST_BYTES = 96 * MIB


def run(quick: bool, names: Sequence[str] = (LIMIT, VLLM_FS, DISK)) -> Result:
    """As `peers.run`."""
    return measured("narrow", replace(QUICK if quick else FULL, together=1, small=HOST_BYTES), names)
