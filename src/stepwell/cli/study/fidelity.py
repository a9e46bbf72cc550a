"""`stepwell fidelity` and `stepwell indexes`: what tiering does to a user's own models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stepwell.cli.options import Json
from stepwell.cli.output import emit


def fidelity(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model (default: SmolLM2-135M-Instruct, as the demo).")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Your documents, one JSON object a line: prompt, gold, continuation."),
    ] = None,
    tasks_named: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Built-in tasks, such as 'kvtable(32),json_extract,nat' (default: all)."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Policies: NAME, NAME:token or NAME:page32; full, oracle, recency and random are controls.",
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="Lengths of the prompts in tokens (default: 2K).")
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="SHARE,...", help="Shares of the context read in each step (default: 6.25%,12.5%,25%)."),
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Documents for each seed (default: 5).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds (default: 3).")] = None,
    tier: Annotated[str, typer.Option(help="Tier for cold pages: host or disk.")] = "host",
    disk: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier (default: the one for temporary files).")
    ] = None,
    hot: Annotated[
        str, typer.Option(metavar="SHARE", help="Share of the prompt that stays on the model's device.")
    ] = "25%",
    audit: Annotated[bool, typer.Option("--audit", help="Measure the attention that was left out, too.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a small selection, in less than five minutes on two cores.")
    ] = False,
    limit_seconds: Annotated[
        float | None, typer.Option(min=1, help="Begin no document that would end after this time.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the rows and the machine's facts to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a report with plots to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how accurate sparse policies are on a model.

    They are compared with full attention on tasks that need many facts, and the bytes that they move are counted.

    JSON: {"rows": [...]}; rows have task, policy, tier, granularity, budget, tokens, digits, kl_mean, top1,
    field_accuracy, full_field_accuracy, bytes_cold_to_hot, bytes_all_fp16, index_bytes, hot_bytes, and more.
    """
    # Read when torch is loaded. On a busy machine threads that spin while they wait made steps 12 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from stepwell.demo.progress import PlainProgress
    from stepwell.fidelity import program
    from stepwell.fidelity.results import report

    wanted = program.FidelityRequest(
        model=model, own=tasks, policies=policies, tasks=tasks_named, lengths=lengths, budgets=budgets,
        documents=documents, seeds=seeds, quick=quick, tier=tier, hot=hot, disk=disk, audit=audit,
        limit_s=limit_seconds,
    )  # fmt: skip
    for path in (out, html):
        if path is not None:
            report.check(path)
    result = program.run(wanted, PlainProgress())
    about = report.RunFacts(result.model, result.facts)
    if out is not None:
        report.write_json(out, result.rows, about)
    if html is not None:
        report.write_html(html, result.rows, about)
    emit(report.plain(result.rows), as_json=as_json, text=report.table(result.rows, about))


def indexes(
    lengths: Annotated[
        str, typer.Option(metavar="N,...", help="Lengths of the contexts in tokens, up to millions.")
    ] = "64K",
    records: Annotated[
        str, typer.Option(metavar="M,...", help="Numbers of facts that a query needs at once.")
    ] = "1,16",
    budgets: Annotated[
        str, typer.Option(metavar="SHARE,...", help="Shares of the context read by a query.")
    ] = "3.125%,6.25%,12.5%",
    queries: Annotated[int, typer.Option(min=1, help="Number of queries, each with facts of its own.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure which key indexes find planted facts.

    The attention is constructed and needs no model: some seconds for each length.

    JSON: {"rows": [...]}; rows have world, tokens, records, rho, outliers, drift, index, granularity, budget,
    needle_recall, needle_recall_ci, index_bytes, bytes_all_fp16, and more.
    """
    from stepwell.fidelity import indexes as program
    from stepwell.fidelity import options

    asked = options.counts(records, "--records")
    found = program.run(options.lengths(lengths), asked, options.shares(budgets, "--budgets"), queries, seed)
    emit(program.plain(found), as_json=as_json, text=program.table(found))
