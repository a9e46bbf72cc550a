"""`stepwell simulate-fleet`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stepwell.cli.options import BlockTokens, Json, Open, StrictTrace, TraceFormat
from stepwell.cli.output import emit, warn
from stepwell.units import format_size

if TYPE_CHECKING:
    from stepwell.simulate.fleet.results import FleetRow, Seconds


def simulate_fleet(
    fleet: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Description of the fleet; see docs/fleet.md.")],
    traces: Annotated[list[str], typer.Argument(help="Files, or generators: scan, churn, cyclic, zipf, agentic.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable."),
    ] = None,
    requests: Annotated[Path | None, typer.Option(help="Write a line of JSON for each request to this file.")] = None,
    open_: Open = None,
    block_tokens: BlockTokens = None,
    format_: TraceFormat = None,
    strict: StrictTrace = False,
    as_json: Json = False,
) -> None:
    """Replay traces on a fleet of hosts that a file describes.

    The table shows what hosts, tiers, routing and failures do to hits, times and the wear of drives.
    """
    from stepwell.simulate.fleet import description
    from stepwell.simulate.fleet.results import simulate, written
    from stepwell.simulate.traces.load import load

    described = description.load(fleet, set_ or ())
    warn(described.warnings)
    rows = []
    lines: list[bytes] = []
    for source in traces:
        loaded = load(source, open_=open_, block_tokens=block_tokens, strict=strict, format_=format_)
        for told in loaded.problems.summary():
            typer.echo(f"{source}: {told}", err=True)
        row, of_requests = simulate(described.settings, loaded.trace)
        rows.append(row)
        if requests is not None:
            lines += [msgspec.json.encode({"trace": row.trace, **asdict(one)}) for one in of_requests]
    if requests is not None:
        written(requests, lines)
    emit({"rows": [asdict(row) for row in rows]}, as_json=as_json, text="\n\n".join(map(_table, rows)))


def _table(row: FleetRow) -> str:
    lines = [
        f"{row.trace}: {row.requests:,} requests of {row.input_tokens / 1e6:,.1f} M tokens "
        f"in {row.seconds:,.0f} s, {row.engines} engine(s)",
        f"  hit {row.hit_tokens_ratio:.1%} of at best {row.ceiling_ratio:.1%}; "
        f"{row.recomputed_tokens / 1e6:,.1f} M tokens computed, {row.lost_requests} requests sent anew",
        f"  {'':<22} {'mean':>9} {'p50':>9} {'p95':>9} {'p99':>9} {'GPU s':>11}",
        _seconds("first token after, s", row.ttft_s, row.gpu_s),
        _seconds("  with GPUs alone", row.ttft_without_tiers_s, row.gpu_without_tiers_s),
        f"  of it recall {row.recall_mean_s:.3f} s, queue {row.queue_mean_s:.3f} s, compute {row.compute_mean_s:.3f} s;"
        f" {row.gpu_saved_s:,.0f} GPU s saved",
        f"  {'tier':<7} {'hit':>6} {'capacity':>10} {'held':>10} {'read':>10} {'written':>10} {'a day':>10}  years",
    ]
    for tier in row.tiers:
        sizes = (tier.capacity_bytes, tier.held_bytes, tier.read_bytes, tier.written_bytes, tier.written_a_day_bytes)
        years = "" if tier.years_to_wear_out is None else f"{tier.years_to_wear_out:.1f}"
        dropped = f", {format_size(tier.dropped_bytes)} dropped" if tier.dropped_bytes else ""
        shown = " ".join(f"{format_size(size):>10}" for size in sizes)
        lines.append(f"  {tier.tier:<7} {tier.hit_tokens_ratio:>6.1%} {shown}  {years}{dropped}".rstrip())
    return "\n".join(lines)


def _seconds(name: str, of: Seconds, gpu_s: float) -> str:
    return f"  {name:<22} {of.mean:>9.3f} {of.p50:>9.3f} {of.p95:>9.3f} {of.p99:>9.3f} {gpu_s:>11,.0f}"
