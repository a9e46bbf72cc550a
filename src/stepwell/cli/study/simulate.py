"""`stepwell simulate`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepwell import renamed
from stepwell.cli.options import BlockTokens, Json, Open, StrictTrace, TraceFormat
from stepwell.cli.output import emit, warn
from stepwell.units import format_size

if TYPE_CHECKING:
    from stepwell.simulate.point import SweepRow


def simulate(
    traces: Annotated[list[str], typer.Argument(help="Files, or generators: scan, churn, cyclic, zipf, agentic.")],
    policy: Annotated[
        str, typer.Option(help="Policies to compare, NAME[,NAME...]; see docs/policies.md.")
    ] = "auto,lru",
    capacity_tokens: Annotated[
        str, typer.Option(help="Sizes of the tier, N[,N...]: tokens, or shares of the working set.")
    ] = "1%,2%,5%,10%,20%,50%",
    full: Annotated[
        str | None, typer.Option(help="Bytes of a token in layers that need every token, for models with others, too.")
    ] = None,
    window: Annotated[
        list[str] | None, typer.Option(help="Layers with a window, TOKENS:BYTES of a token; several times for several.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="Bytes of a recurrent state; several times for several.")
    ] = None,
    cost: Annotated[str, typer.Option(help="Prefill cost to assume: MODEL@MACHINE.")] = "llama-3.1-8b@h100",
    open_: Open = None,
    block_tokens: BlockTokens = None,
    format_: TraceFormat = None,
    strict: StrictTrace = False,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")] = os.cpu_count() or 1,
    ray: Annotated[
        str, typer.Option(help="Spread over a Ray cluster instead: its address, auto, or local (extra `ray`).")
    ] = "",
    keep: Annotated[
        Path | None, typer.Option(help="Add rows to this file as they come; what it has already is not computed again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay traces with several policies and sizes of a tier.

    The table shows what each of them would have hit and saved. With --full, --window and --state it is for a model that
    keeps more than one kind of KV: `stepwell cache namespaces` says what yours does.
    """
    from stepwell.simulate import options
    from stepwell.simulate.groups.model import model_groups
    from stepwell.simulate.sweep import SweepRequest, sweep
    from stepwell.simulate.traces.load import load

    given = (name.strip().lower() for name in policy.split(","))
    warn(renamed.old_value("policy", name) for name in given if renamed.value("policy", name) != name)
    names, sizes = options.policies(policy), options.capacities(capacity_tokens)
    model = model_groups(full, window or (), state or (), names)
    loaded = [load(t, open_=open_, block_tokens=block_tokens, strict=strict, format_=format_) for t in traces]
    for one in loaded:
        for told in one.problems.summary():
            typer.echo(f"{one.problems.source}: {told}", err=True)
    wanted = SweepRequest([one.trace for one in loaded], names, sizes, cost, model)
    rows = dict(sweep(wanted, processes=processes, keep=keep, cluster=ray))
    ordered = [rows[at] for at in wanted.points()]
    shown = [{name: value for name, value in asdict(row).items() if value is not None} for row in ordered]
    emit({"rows": shown}, as_json=as_json, text=_table(ordered))


def _table(rows: list[SweepRow]) -> str:
    lines = []
    trace = None
    for row in rows:
        if row.trace != trace:
            trace = row.trace
            lines += [
                f"{trace}: {row.requests:,} requests of {row.input_tokens / 1e6:,.1f} M tokens, "
                f"{row.working_set_tokens / 1e6:,.1f} M distinct;",
                f"  at best {row.ceiling_ratio:.1%} hit; {row.prefill_s:,.0f} s of prefill ({row.cost})",
                f"  {'capacity':>14} {'policy':<13} {'hit':>6} {'saved s':>11} {'spilled':>12} {'blocks/s':>12}",
            ]
        lines.append(
            f"  {row.capacity_tokens:>14,} {row.policy:<13} {row.hit_tokens_ratio:>6.1%} {row.saved_prefill_s:>11,.0f} "
            f"{row.spilled_tokens / 1e6:>10,.1f} M {row.references_per_s:>12,}"
        )
        if row.groups is not None:
            groups = row.groups
            lines.append(
                f"  {'':>14} {'':<13} {groups.prefix_tokens_ratio:>6.1%} by prefixes alone; windows and states take "
                f"{groups.tail_share:.1%} of the tier, {format_size(groups.spilled_tail_bytes)} spilled"
            )
    return "\n".join(lines)
