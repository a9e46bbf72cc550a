"""What published systems reach, judged from rows that the harness kept: TTKV's traffic, YAKV's accuracy at equal bytes.

Rows are as JSON has them. Nothing is judged that was not measured, and fewer than `DIGITS` tokens of facts are no
evidence for a point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.bench.report import Row, Target
from stepwell.demo.results.stats import Estimate
from stepwell.fidelity.results.rows import DIGITS

Kept = Mapping[str, Any]
FULL, TOKENS, PAGES, YAKV = "full", "stepwell-tokens", "stepwell", "yakv"
NEAR, WITHIN, HALF = Target("<=", 0.01), Target(">=", -1.0), Target("<=", 0.5)
HOST, DISK = Target(">=", 20), Target(">=", 8)
HOT_SHARE = 0.5
"""Of the prompt's KV, on the fast tier, where pages lie on disk."""
HARDEST = 2
SAME_ROOM = 1.1
"""On the fast tier, pool, tail and index: more than so many times the other's is no equal comparison."""
SAME_BYTES = 0.8
"""Nor is less than such a share of the bytes that the other fetched."""


def traffic(rows: Sequence[Kept], policy: str, less: Target, hot: float | None = None) -> Iterator[Row]:
    """TTKV's anchor (arXiv 2604.19769, 5.94 x): of each task the most times fewer bytes than all in fp16, of those
    budgets that stay near full attention: by KL, by facts where it has any, and, if `hot` is given, with no more than
    this share of the prompt's KV on the fast tier. What each budget reached is told below it."""
    ours = [row for row in rows if row["policy"] == policy and not row["blind"]]
    for of in dict.fromkeys(_of_what(row) for row in ours):
        some = [row for row in ours if _of_what(row) == of]
        task, tokens, unit, tier = of
        where = f"{task}, {tokens:,} tokens, {policy}, {unit}, {tier}: fewer bytes than all in fp16"
        enough = [row for row in some if not row["digits"] or row["digits"] >= DIGITS]
        shares = [_hot_share(row, rows) if hot is not None else 0.0 for row in enough]
        if not enough or any(share is None for share in shares):
            why = "no row of full attention beside it" if enough else f"fewer than {DIGITS:,} digits"
            yield Row(where, "x", None, less, why)
        else:
            near = [row for row, share in zip(enough, shares, strict=True) if _near(row) and (share or 0) <= (hot or 1)]
            best = max(near, key=_times, default=None)
            told = (
                f"at {100 * best['budget']:g} %" if best is not None else "at no budget near enough to full attention"
            )
            yield Row(where, "x", _counted(_times(best) if best is not None else 0.0, some[0]), less, told)
        for row in some:
            yield Row(f"  at {100 * row['budget']:g} %", "x", _counted(_times(row), row))
            yield Row("  KL to full attention, mean", "nat", _measured(row, "kl_mean"))
            if row["digits"]:
                points = _measured(row, "field_difference").times(100)
                yield Row("  facts right, less full attention's", "points", points, None, f"{row['digits']:,} digits")


def _of_what(row: Kept) -> tuple[str, int, str, str]:
    return row["task"], row["tokens"], row["granularity"], row["tier"]


def _times(row: Kept) -> float:
    times: float = row["bytes_all_fp16"] / max(1, row["bytes_cold_to_hot"])
    return times


def _near(row: Kept) -> bool:
    return NEAR.met(row["kl_mean"]) and (not row["digits"] or WITHIN.met(100 * row["field_difference"]))


def _hot_share(row: Kept, rows: Sequence[Kept]) -> float | None:
    """Of the prompt's KV, by what full attention holds when it is through; None: no row tells."""
    of = ("task", "tokens", "documents", "seeds")
    full = next((one for one in rows if one["policy"] == FULL and all(one[name] == row[name] for name in of)), None)
    if full is None:
        return None
    prompt = full["hot_bytes"] * full["tokens"] / (full["tokens"] + full["steps"] / full["documents"])
    share: float = row["hot_bytes"] / prompt
    return share


def at_equal_bytes(rows: Sequence[Kept]) -> Iterator[Row]:
    """YAKV's anchor (arXiv 2604.08426): of its gap to full attention, how much is left with no more bytes fetched. At
    each of its budgets, the two tasks where its gap is widest are judged, by facts and by KL; others are told. So is
    what fetched far fewer bytes, or has more room on the fast tier than YAKV, which keeps nothing there of those."""
    for budget in sorted({row["budget"] for row in rows if row["policy"] == YAKV}):
        theirs = [row for row in rows if row["policy"] == YAKV and row["budget"] == budget and not row["blind"]]
        theirs.sort(key=lambda row: float(row["field_difference"]))
        for place, yakv in enumerate(theirs):
            ours = _within(rows, yakv)
            if ours is None:
                continue
            room = _fast(ours) / _fast(yakv)
            share = ours["bytes_cold_to_hot"] / yakv["bytes_cold_to_hot"]
            equal = room <= SAME_ROOM and share >= SAME_BYTES
            judged = HALF if place < HARDEST and equal else None
            where = f"{yakv['task']}: our gap to full attention over yakv's at {100 * budget:g} %"
            beside = (
                f"ours at {100 * ours['budget']:g} %, {share:.2f} x its bytes, {room:.2f} x its room on the fast tier"
            )
            gaps = [100 * max(0.0, -row["field_difference"]) for row in (ours, yakv)]
            told = f"{gaps[0]:.1f} of {gaps[1]:.1f} points; {beside}"
            enough = yakv["digits"] >= DIGITS and gaps[1] >= 1.0
            ratio = _counted(gaps[0] / gaps[1], yakv) if gaps[1] else None
            yield Row(f"{where}, facts", "x", ratio, judged if enough else None, told)
            distances = f"{ours['kl_mean']:.4f} of {yakv['kl_mean']:.4f} nat"
            yield Row("  the same, KL", "x", _counted(ours["kl_mean"] / yakv["kl_mean"], yakv), judged, distances)


def _within(rows: Sequence[Kept], yakv: Kept) -> Kept | None:
    """Ours of the same task, with the most bytes that are no more than these; of those with no more room than its, if
    there are any."""
    some = [
        row
        for row in rows
        if row["policy"] == TOKENS
        and all(row[name] == yakv[name] for name in ("task", "tokens", "tier", "documents", "seeds"))
        and row["bytes_cold_to_hot"] <= yakv["bytes_cold_to_hot"]
    ]
    alike = [row for row in some if _fast(row) <= SAME_ROOM * _fast(yakv)]
    return max(alike or some, key=lambda row: int(row["bytes_cold_to_hot"]), default=None)


def _fast(row: Kept) -> int:
    return int(row["hot_bytes"] + row["index_bytes"])


def _measured(row: Kept, name: str) -> Estimate:
    low, high = row[f"{name}_ci"]
    return Estimate(row[name], low, high, _of(row))


def _counted(value: float, row: Kept) -> Estimate:
    return Estimate(value, value, value, _of(row))


def _of(row: Kept) -> int:
    return int(row["documents"])
