"""LRU and Belady of the simulator beside those of kvcache-simulator (PyPI), on the same traces.

    python scripts/cross_check.py TRACE.jsonl[.zst]...

Needs the command `kvcache-simulator`; writes benchmarks/results/cross_check.json. Counted is what that one counts: of
the second half of the requests, the tokens of blocks that the trace names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.ops import machine
from stepwell.policies.catalog import POLICIES
from stepwell.simulate.formats.lines import lines_of
from stepwell.simulate.optimal import optimal
from stepwell.simulate.replay import Replay
from stepwell.simulate.traces.load import load
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Ints, Trace

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results/cross_check.json"
MODEL, TOKEN_BYTES = "llama-3.1-8b", 131072  # only the blocks that fit count, so the model does not matter
BLOCKS = (2048, 16384)


def theirs(path: Path, block_tokens: int) -> dict[str, Any]:
    """Their report on a plain trace."""
    budgets = ",".join(str(blocks * block_tokens * TOKEN_BYTES / 2**30) for blocks in BLOCKS)
    command = ["kvcache-simulator", "run", "--trace", str(path), "--model", MODEL, "--block-size", str(block_tokens),
               "--budgets-gib", budgets, "--policies", "lru,optimal", "--format", "json", "--no-progress"]  # fmt: skip
    report: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report


def ours(trace: Trace, policy: str, blocks: int) -> Ints:
    """Tokens in the blocks that each request hits."""
    if policy == "optimal":
        hits = optimal(trace, blocks).hits
    else:
        hits = Replay(trace, POLICIES[policy](), blocks, lambda first, last: float(last - first)).run().hits
    return np.minimum(hits * trace.block_tokens, trace.inputs)


def rows(source: Path) -> list[dict[str, Any]]:
    trace = load(str(source)).trace
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.jsonl"  # theirs reads no zstd
        plain.write_bytes(b"".join(line + b"\n" for _, line in lines_of(source, Problems(trace.name, strict=True))))
        report = theirs(plain, trace.block_tokens)
    half = report["metadata"]["warmupRequests"]
    named = np.minimum(np.diff(trace.starts) * trace.block_tokens, trace.inputs)
    total = int(named[half:].sum())
    found = []
    for point in report["points"]:
        for policy, result in point["results"].items():
            assert result["totalTokens"] == total
            found.append({
                "trace": trace.name, "policy": policy, "blocks": result["cacheBlocks"], "tokens": total,
                "hit_tokens": int(ours(trace, policy, result["cacheBlocks"])[half:].sum()),
                "theirs_hit_tokens": result["hitTokens"],
            })  # fmt: skip
    return found


def main() -> None:
    found = [row for source in sys.argv[1:] for row in rows(Path(source))]
    for row in found:
        share = {name: row[name] / row["tokens"] for name in ("hit_tokens", "theirs_hit_tokens")}
        print(f"{row['trace']:28} {row['policy']:8} {row['blocks']:7,}  "
              f"ours {share['hit_tokens']:.4%}  theirs {share['theirs_hit_tokens']:.4%}")  # fmt: skip
    kept = {
        "benchmark": "cross_check",
        "command": "python scripts/cross_check.py TRACE...",
        "rows": found,
        "machine": machine.facts(),
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
