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
        Path | None, typer.Option(metavar="FILE.jsonl", help="Your documents: prompt, gold, continuation; one a line.")
    ] = None,
    tasks_named: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Of ours, such as 'kvtable(32),json_extract,nat' (all).")
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="NAME, NAME:token or NAME:page32; full, oracle, recency, random."),
    ] = None,
    lengths: Annotated[str | None, typer.Option(metavar="N,...", help="Tokens of the prompts (2K).")] = None,
    budgets: Annotated[
        str | None, typer.Option(metavar="SHARE,...", help="Of the context, in each step (6.25%,12.5%,25%).")
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Documents of each seed (5).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds (3).")] = None,
    tier: Annotated[str, typer.Option(help="Where cold pages lie: host or disk.")] = "host",
    disk: Annotated[Path | None, typer.Option(help="Folder of the disk tier (default: for temporary files).")] = None,
    hot: Annotated[str, typer.Option(metavar="SHARE", help="Of the prompt, kept on the model's device.")] = "25%",
    audit: Annotated[bool, typer.Option("--audit", help="Also measure the attention that was truly left out.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Little of it, in less than five minutes on two cores.")
    ] = False,
    limit_seconds: Annotated[float | None, typer.Option(min=1, help="Begin no document that would end later.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Keep the rows with the machine's facts.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="A report with plots, in one file.")] = None,
    as_json: Json = False,
) -> None:
    """How accurate is a policy, and what does it move? Beside full attention, on tasks that need many facts.

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
    lengths: Annotated[str, typer.Option(metavar="N,...", help="Tokens, up to millions.")] = "64K",
    records: Annotated[str, typer.Option(metavar="M,...", help="Facts that a query needs at once.")] = "1,16",
    budgets: Annotated[str, typer.Option(metavar="SHARE,...", help="Of the context.")] = "3.125%,6.25%,12.5%",
    queries: Annotated[int, typer.Option(min=1, help="Queries, each with records of its own.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of everything.")] = 0,
    as_json: Json = False,
) -> None:
    """Which key indexes find what was planted? Constructed attention, no model; seconds for each length.

    JSON: {"rows": [...]}; rows have world, tokens, records, rho, outliers, drift, index, granularity, budget,
    needle_recall, needle_recall_ci, index_bytes, bytes_all_fp16, and more.
    """
    from stepwell.fidelity import indexes as program
    from stepwell.fidelity import options

    asked = options.counts(records, "--records")
    found = program.run(options.lengths(lengths), asked, options.shares(budgets, "--budgets"), queries, seed)
    emit(program.plain(found), as_json=as_json, text=program.table(found))


moved = typer.Typer(help="Where `fidelity` and `indexes` were before 0.2.")


@moved.command("fidelity", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def old_fidelity() -> None:
    """It is `stepwell fidelity` now."""
    _moved("fidelity")


@moved.command("indexes", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def old_indexes() -> None:
    """It is `stepwell indexes` now."""
    _moved("indexes")


def _moved(name: str) -> None:
    typer.echo(f"`stepwell bench {name}` is `stepwell {name}` now, with the same options", err=True)
    raise typer.Exit(2)
