"""What published systems reach, judged from rows that the harness kept: TTKV's traffic, YAKV's accuracy at equal bytes.

Rows are as JSON has them. Nothing is judged that was not measured, and fewer than `DIGITS` tokens of facts are no
evidence for a point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepwell.bench.report import Row, Target
from stepwell.bench.stats import Estimate

Kept = Mapping[str, Any]
DIGITS = 1000
TOKENS, PAGES, YAKV = "stepwell-tokens", "stepwell", "yakv"
NEAR, WITHIN, HALF = Target("<=", 0.01), Target(">=", -1.0), Target("<=", 0.5)
HOST, DISK = Target(">=", 20), Target(">=", 8)
HARDEST = 2


def traffic(rows: Sequence[Kept], policy: str, less: Target) -> Iterator[Row]:
    """TTKV's anchor (arXiv 2604.19769, 5.94 x): how many times fewer bytes than all in fp16, at what accuracy."""
    for row in rows:
        if row["policy"] != policy or row["blind"]:
            continue
        where = f"{row['task']}, {policy} at {row['budget']:.3%}, {row['granularity']}, {row['tier']}"
        times = row["bytes_all_fp16"] / max(1, row["bytes_cold_to_hot"])
        yield Row(f"{where}: fewer bytes than all in fp16", "x", _counted(times, row), less)
        yield Row("  KL to full attention, mean", "nat", _measured(row, "kl_mean"), NEAR)
        if row["digits"]:
            points = _measured(row, "field_difference").times(100)
            enough = row["digits"] >= DIGITS
            beside = f"{row['digits']:,} digits" + ("" if enough else ": too few to judge a point by")
            yield Row("  facts right, less full attention's", "points", points, WITHIN if enough else None, beside)


def at_equal_bytes(rows: Sequence[Kept]) -> Iterator[Row]:
    """YAKV's anchor (arXiv 2604.08426): of its gap to full attention, how much is left with no more bytes fetched. At
    each of its budgets, the two tasks where its gap is widest are judged, by facts and by KL; others are told."""
    for budget in sorted({row["budget"] for row in rows if row["policy"] == YAKV}):
        theirs = [row for row in rows if row["policy"] == YAKV and row["budget"] == budget and not row["blind"]]
        theirs.sort(key=lambda row: float(row["field_difference"]))
        for place, yakv in enumerate(theirs):
            ours = _within(rows, yakv)
            if ours is None:
                continue
            judged = HALF if place < HARDEST else None
            share = ours["bytes_cold_to_hot"] / yakv["bytes_cold_to_hot"]
            where = f"{yakv['task']}: our gap to full attention over yakv's at {budget:.3%}"
            beside = f"ours at {ours['budget']:.3%}, {share:.2f} x its bytes"
            gaps = [100 * max(0.0, -row["field_difference"]) for row in (ours, yakv)]
            told = f"{gaps[0]:.1f} of {gaps[1]:.1f} points; {beside}"
            enough = yakv["digits"] >= DIGITS and gaps[1] >= 1.0
            ratio = _counted(gaps[0] / gaps[1], yakv) if gaps[1] else None
            yield Row(f"{where}, facts", "x", ratio, judged if enough else None, told)
            distances = f"{ours['kl_mean']:.4f} of {yakv['kl_mean']:.4f} nat"
            yield Row("  the same, KL", "x", _counted(ours["kl_mean"] / yakv["kl_mean"], yakv), judged, distances)


def _within(rows: Sequence[Kept], yakv: Kept) -> Kept | None:
    """Ours of the same task, with the most bytes that are no more than these."""
    some = [
        row
        for row in rows
        if row["policy"] == TOKENS
        and all(row[name] == yakv[name] for name in ("task", "tokens", "tier", "documents", "seeds"))
        and row["bytes_cold_to_hot"] <= yakv["bytes_cold_to_hot"]
    ]
    return max(some, key=lambda row: int(row["bytes_cold_to_hot"]), default=None)


def _measured(row: Kept, name: str) -> Estimate:
    low, high = row[f"{name}_ci"]
    return Estimate(row[name], low, high, _of(row))


def _counted(value: float, row: Kept) -> Estimate:
    return Estimate(value, value, value, _of(row))


def _of(row: Kept) -> int:
    return int(row["documents"])
