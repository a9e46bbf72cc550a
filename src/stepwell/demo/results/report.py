"""Prints the demo's result: a table for a person, or one line of JSON for a program."""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from stepwell.demo.model import cache_folder
from stepwell.demo.results.result import DemoResult
from stepwell.units import format_size


def show(result: DemoResult, *, as_json: bool = False) -> None:
    print(json_line(result) if as_json else text(result))


def json_line(result: DemoResult) -> str:
    """One flat JSON object; intervals are [low, high], and unmeasured values are null."""
    return msgspec.json.encode(asdict(result)).decode()


def text(result: DemoResult) -> str:
    """The report as text of 80 columns, without colour."""
    rows = [
        ("cold: everything computed", result.cold_ttft_s, 1.0 if result.cold_ttft_s else None, None, None, 0),
        ("engine hit: asked again at once", result.engine_hit_ttft_s, result.engine_hit_speedup, None, None, 0),
        (
            "recalled from the host tier",
            result.host_recall_ttft_s,
            result.host_speedup,
            result.host_ratio,
            result.host_ratio_ci,
            result.host_pairs,
        ),
        (
            "recalled by a new engine",
            result.restart_recall_ttft_s,
            result.restart_speedup,
            result.restart_ratio,
            result.restart_ratio_ci,
            result.restart_pairs,
        ),
    ]
    if result.disk_bytes is not None:
        rows.append(
            (
                "recalled from disk, all new",
                result.disk_recall_ttft_s,
                result.disk_speedup,
                result.disk_ratio,
                result.disk_ratio_ci,
                result.disk_pairs,
            )
        )
    table = [f"{'':31} {'TTFT p50':>9} {'speed-up':>9}   / engine hit (95 %; pairs)"]
    table += [_row(*row) for row in rows]
    return "\n".join((_head(result), "", *table, "", *_findings(result), "", *_further(result)))


def _head(result: DemoResult) -> str:
    return (
        f"{result.model} in {result.engine}: {result.documents} documents, {result.document_tokens} tokens;\n"
        f"engine pool {result.pool_pages} pages of {result.page} tokens; {result.seconds:.0f} s"
    )


def _row(
    name: str,
    ttft_s: float | None,
    speedup: float | None,
    ratio: float | None,
    ci: tuple[float, float] | None,
    pairs: int,
) -> str:
    time = f"{ttft_s * 1e3:.0f} ms" if ttft_s is not None else "-"
    times = f"{speedup:.1f} x" if speedup is not None else "-"
    over = f"   {ratio:.3f} ({ci[0]:.3f} to {ci[1]:.3f}; {pairs})" if ratio is not None and ci is not None else ""
    return f"{name:31} {time:>9} {times:>9}{over}"


def _findings(result: DemoResult) -> list[str]:
    same = {True: "yes, all", False: "NO", None: "not measured: nothing was recalled"}[result.identical]
    yardstick = "an engine hit's" if result.keeps_prefixes else "cold ones, as this engine has no hits"
    size = result.recalled_token_bytes
    each = f"; {format_size(round(size))} for each" if size is not None else ""
    lines = [
        f"answers identical to {yardstick}: {same} ({result.pairs} pairs)",
        f"recalled: {result.recalled_tokens} tokens, counted by vLLM{each}",
        "speed-up: median over answers, each beside its own document's cold one",
    ]
    if result.host_bytes is not None:
        lines.append(f"held in host memory at the end: {format_size(result.host_bytes)}")
    if result.disk_bytes is not None:
        lines.append(f"held on disk when engine and well were killed: {format_size(result.disk_bytes)}")
    if result.dropped_pairs:
        reasons = (
            ("nothing recalled", result.dropped_not_recalled),
            ("partly in the engine", result.dropped_partly_local),
            ("second one no engine hit", result.dropped_hit_not_local),
            ("unequal cached tokens", result.dropped_unequal),
            ("not from disk", result.dropped_not_from_disk),
        )
        shown = ", ".join(f"{count} {reason}" for reason, count in reasons if count)
        lines.append(f"pairs not counted: {result.dropped_pairs} ({shown})")
    return lines


def _further(result: DemoResult) -> list[str]:
    models = cache_folder() / "models"
    kept = f"The converted model stays for the next time; delete it with\n  rm -r {models}"
    return [
        "The engine and this demo's well are stopped; their memory and files are gone.",
        "With your own engine: `stepwell vllm-args` prints the flags, `stepwell stats`",
        "shows a well while it serves, `stepwell stop` ends it and deletes its blocks.",
        *([kept] if models.is_dir() else []),
    ]
