"""`stepwell indexes`: every key index on constructed attention (`constructed`), and a table of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from stepwell.errors import ConfigError
from stepwell.fidelity.constructed import Construction, IndexRecall, measure
from stepwell.longctx.parts.index.base import IndexKind
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.index.landmark import MeanLandmark
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.index.rotated import RotatedKeys

_CODED: dict[str, IndexKind] = {
    "4 bits, centred": RotatedKeys(4),
    "2 bits, centred": RotatedKeys(2),
    "2 bits": RotatedKeys(2, centred=False),
    "1 bit, centred": RotatedKeys(1),
}
KINDS: dict[int, dict[str, IndexKind]] = {
    1: {"oracle": TrueKeys(), **_CODED},
    16: {"oracle": TrueKeys(), **_CODED, "min/max": MinMax(), "mean": MeanLandmark(), "mean of 8": MeanLandmark(8)},
    32: {"oracle": TrueKeys(), "2 bits, centred": RotatedKeys(2), "min/max": MinMax(), "mean": MeanLandmark()},
    128: {"oracle": TrueKeys(), "2 bits, centred": RotatedKeys(2), "min/max": MinMax(), "mean": MeanLandmark()},
}
"""Index kinds by the number of tokens of a page, then by name."""
WORLDS: dict[str, dict[str, float]] = {
    "smooth": {},
    "rough": {"rho": 0.0},
    "outlier channels": {"outliers": 20.0},
    "drift": {"drift": 6.0},
}

Found = list[tuple[str, IndexRecall]]


def run(tokens: Sequence[int], records: Sequence[int], budgets: Sequence[float], queries: int, seed: int) -> Found:
    """Runs all combinations, in this order of parameters. Raises ConfigError SW-128 if the records do not fit."""
    found: Found = []
    for length, count, (world, settings) in product(tokens, records, WORLDS.items()):
        made = replace(Construction(length, count, queries=queries, seed=seed), **settings)  # type: ignore[arg-type]
        try:
            for page_tokens, kinds in KINDS.items():
                found += [(world, one) for one in measure(made, kinds, page_tokens, budgets)]
        except ValueError as error:
            raise ConfigError(
                "SW-128",
                what=f"{count} records cannot be planted for each of {queries} queries",
                why=str(error),
                fix="ask for a longer context, fewer records or fewer queries",
            ) from error
    return found


def plain(found: Found) -> dict[str, Any]:
    """Output of `--json`."""
    return {"rows": [{"world": world, **one.plain()} for world, one in found]}


def table(found: Found) -> str:
    """A line for each world, index and granularity; a column for each budget."""
    budgets = list(dict.fromkeys(one.budget for _, one in found))
    groups: dict[tuple[int, int], dict[tuple[str, str, str], list[IndexRecall]]] = {}
    for world, one in found:
        lines = groups.setdefault((one.made.tokens, one.made.records), {})
        lines.setdefault((world, one.granularity, one.index), []).append(one)
    told = []
    for (tokens, records), lines in groups.items():
        told += [
            f"{tokens:,} tokens, {records} records a query: share of their tokens that is selected",
            f"  {'':<17} {'':<9} {'index':<16} {'of KV':>6} " + " ".join(f"{budget:>8.2%}" for budget in budgets),
        ]
        for (world, unit, name), some in lines.items():
            size = some[0].index_bytes / some[0].bytes_all_fp16
            cells = " ".join(f"{one.recall.value:>8.3f}" for one in some)
            told.append(f"  {world:<17} {unit:<9} {name:<16} {size:>6.1%} {cells}")
        told.append("")
    return "\n".join(told).rstrip()
