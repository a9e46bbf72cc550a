"""The report: a table on a terminal, and one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from stepwell.errors import ConfigError
from stepwell.fidelity.options import FULL
from stepwell.fidelity.results.plots import PlotLine, PlotMark, chart, legend
from stepwell.fidelity.results.rows import DIGITS, FidelityRow
from stepwell.units import format_size

BLIND = "blind control: nearly every policy passes it, so it tells nothing"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #27272a; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1, h2 { font-weight: 600 } h2 { margin-top: 2.4rem } .note { color: #52525b } .blind { color: #b91c1c }
.charts { display: flex; flex-wrap: wrap; gap: 1rem } .charts svg { width: 460px; max-width: 100%; height: auto }
.legend span { margin-right: 1.2em; white-space: nowrap } .legend i { display: inline-block; width: 12px; height: 12px;
  margin-right: .4em; border-radius: 2px }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .25em .7em; text-align: right;
  border-bottom: 1px solid #e4e4e7; white-space: nowrap } td:first-child, th:first-child { text-align: left }
.scroll { overflow-x: auto }
"""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Origin of the rows. `facts`: of the machine and the command, in the form in which they are shown."""

    model: str
    facts: Mapping[str, Any]


def plain(rows: Sequence[FidelityRow]) -> dict[str, Any]:
    """Output of `--json`."""
    return {"rows": [asdict(row) for row in rows]}


def table(rows: Sequence[FidelityRow], about: RunFacts) -> str:
    """The table as text, about 80 columns wide, without colour."""
    lines = [f"{about.model}, teacher-forced, beside full attention; 95 % intervals over documents"]
    for group in _groups(rows):
        first = group[0]
        lines += [
            "",
            f"{_title(first)}: {first.documents} documents, {first.steps} steps, " + facts(first.digits),
            *([f"  {BLIND}"] if first.blind else []),
            f"  {'policy':<12} {'unit':<8} {'budget':>7} {'KL mean':>8} {'p99':>7} {'top-1':>6} "
            f"{'facts':>6} {'- full':>17} {'x less':>7} {'index':>8}",
        ]
        lines += [_line(row) for row in group]
    return "\n".join(lines)


def facts(digits: int) -> str:
    """The number of facts scored, and whether it is enough to resolve a hundredth."""
    if not digits:
        return "every next token counts as a fact"
    return f"{digits:,} tokens of facts" + (", too few to judge a point by" if digits < DIGITS else "")


def _line(row: FidelityRow) -> str:
    low, high = (100 * end for end in row.field_difference_ci)
    less = f"{row.times_less:.1f}" if row.times_less else "-"
    return (
        f"  {row.policy:<12} {row.granularity:<8} {row.budget:>7.2%} {row.kl_mean:>8.4f} {row.kl_p99:>7.3f} "
        f"{row.top1:>6.1%} {row.field_accuracy:>6.1%} {100 * row.field_difference:>+5.1f} ({low:+.1f} {high:+.1f}) "
        f"{less:>7} {format_size(row.index_bytes):>8}"
    )


def write_html(path: Path, rows: Sequence[FidelityRow], about: RunFacts) -> None:
    """Raises ConfigError SW-123 if the file cannot be written."""
    write(path, html(rows, about))


def write_json(
    path: Path, rows: Sequence[FidelityRow], about: RunFacts, extra: Mapping[str, Any] | None = None
) -> None:
    """Writes the rows with their origin. Raises ConfigError SW-123."""
    kept = {"benchmark": "fidelity", "model": about.model, "machine": dict(about.facts), **plain(rows), **(extra or {})}
    write(path, msgspec.json.format(msgspec.json.encode(kept), indent=1).decode() + "\n")


def check(path: Path) -> None:
    """Raises ConfigError SW-123 if a file cannot be made at `path`; for use before a long run."""
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise _unwritable(path, "there is no such folder" if not path.is_dir() else "it is a folder")


def write(path: Path, content: str) -> None:
    """Raises ConfigError SW-123."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "SW-123",
        what=f"{path} cannot be written",
        why=why,
        fix="name a file in a folder that exists and is yours",
    )


def html(rows: Sequence[FidelityRow], about: RunFacts) -> str:
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Fidelity: {escape(about.model)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Fidelity of {escape(about.model)}</h1>",
        '<p class="note">Policies beside full attention on the same prefilled context, teacher-forced. Bytes are the '
        "ledger's: everything that came up from cold tiers, scales included; &quot;x fewer&quot; is against fetching "
        "all cold keys and values in fp16 in every step. Bars are 95 % intervals, documents resampled.</p>",
    ]
    for group in _groups(rows):
        parts += _section(group)
    facts = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in about.facts.items())
    parts += [f'<h2>Run</h2><div class="scroll"><table>{facts}</table></div>', "</body></html>"]
    return "\n".join(parts) + "\n"


def _section(rows: Sequence[FidelityRow]) -> list[str]:
    names = list(dict.fromkeys(_name(row) for row in rows))
    by_name = {name: [row for row in rows if _name(row) == name] for name in names}
    parts = [f"<h2>{escape(_title(rows[0]))}</h2>"]
    if rows[0].blind:
        parts.append(f'<p class="blind">{BLIND}.</p>')
    parts.append(f'<p class="note">{rows[0].documents} documents, {facts(rows[0].digits)}.</p>')
    parts.append(legend(names))
    x_label = "KiB fetched in a step of one document"
    accuracy = "accuracy of facts" if rows[0].digits else "accuracy of the next token"
    kinds = (
        (accuracy, lambda row: (row.field_accuracy, *row.field_accuracy_ci)),
        ("KL to full attention", lambda row: (row.kl_mean, *row.kl_mean_ci)),
        ("top-1 agreement", lambda row: (row.top1, *row.top1_ci)),
    )
    parts.append('<div class="charts">')
    for label, of in kinds:
        lines = [
            PlotLine(name, [PlotMark(row.bytes_a_step / 1024, *of(row)) for row in some], level=some[0].policy == FULL)
            for name, some in by_name.items()
        ]
        parts.append(chart(label, x_label, label, lines))
    parts.append("</div>")
    return [*parts, _html_table(rows)]


def _html_table(rows: Sequence[FidelityRow]) -> str:
    heads = ("policy", "budget", "documents", "KL mean", "95 %", "KL p99", "top-1", "facts", "less full", "95 %",
             "dNLL", "x fewer bytes", "KiB a step", "hits", "index", "hot", "left out (estimated)")  # fmt: skip
    lines = ["<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        cells = (
            _name(row), f"{row.budget:.2%}", row.documents, f"{row.kl_mean:.4f}", _interval(row.kl_mean_ci, ".4f"),
            f"{row.kl_p99:.3f}", f"{row.top1:.1%}", f"{row.field_accuracy:.1%}", f"{100 * row.field_difference:+.1f}",
            _interval((100 * row.field_difference_ci[0], 100 * row.field_difference_ci[1]), "+.1f"),
            f"{row.dnll:+.4f}", f"{row.times_less:.1f}" if row.times_less else "-",
            f"{row.bytes_a_step / 1024:,.1f}", f"{row.hit_rate:.1%}",
            format_size(row.index_bytes), format_size(row.hot_bytes), f"{row.uncovered_mass:.2%}",
        )  # fmt: skip
        lines.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _interval(ends: tuple[float, float], form: str) -> str:
    return f"{ends[0]:{form}} to {ends[1]:{form}}"


def _name(row: FidelityRow) -> str:
    return row.policy if row.policy == FULL else f"{row.policy} ({row.granularity}, {row.tier})"


def _title(row: FidelityRow) -> str:
    facts = f", {row.intensity} {'facts' if row.intensity > 1 else 'fact'} each" if row.intensity else ""
    return f"{row.task}, {row.tokens:,} tokens{facts}"


def _groups(rows: Sequence[FidelityRow]) -> list[list[FidelityRow]]:
    """Groups of rows that may be compared with each other, in the order of the rows."""
    found: dict[tuple[str, int, int], list[FidelityRow]] = {}
    for row in rows:
        found.setdefault((row.task, row.tokens, row.intensity), []).append(row)
    return list(found.values())
