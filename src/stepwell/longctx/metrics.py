"""A ledger as Prometheus text, to be added to a metrics page."""

from __future__ import annotations

from stepwell.longctx.ledger import Ledger

_HELP = {
    "bytes_total": ("counter", "Bytes moved between tiers, scales included."),
    "pages_total": ("counter", "Pages: selected, hits, early, fetched, late, mispredicted, in_place."),
    "tokens_total": ("counter", "Tokens: drafted, accepted, generated."),
    "passes_total": ("counter", "Forward passes: exact ones, and checks of drafts."),
    "seconds_total": ("counter", "Seconds: fetching, and of these, what the model waited (stall)."),
    "alarms_total": ("counter", "Times that the estimated attention left out rose above the policy's alarm."),
    "uncovered_mass": ("gauge", "Share of attention left out, as estimated by the policy, averaged over its steps."),
    "held_bytes": ("gauge", "Bytes in use by tier."),
}


def prometheus(ledger: Ledger) -> str:
    """Exposition text, with metrics `stepwell_longctx_...`. It has no prompts and no names."""
    values: dict[str, list[tuple[str, float]]] = {name: [] for name in _HELP}
    for (source, target, kind), nbytes in sorted(ledger.bytes.items()):
        values["bytes_total"].append((f'{{from="{source}",to="{target}",kind="{kind}"}}', nbytes))
    values["pages_total"] = [(f'{{kind="{kind}"}}', count) for kind, count in sorted(ledger.pages.items())]
    for kind in ("drafted", "accepted", "generated"):
        values["tokens_total"].append((f'{{kind="{kind}"}}', getattr(ledger, kind)))
    values["passes_total"] = [('{kind="exact"}', ledger.exact_passes), ('{kind="verify"}', ledger.verifies)]
    values["seconds_total"] = [(f'{{kind="{kind}"}}', spent) for kind, spent in sorted(ledger.seconds.items())]
    values["alarms_total"] = [("", ledger.alarms)]
    values["uncovered_mass"] = [("", ledger.uncovered_sum / ledger.steps if ledger.steps else 0.0)]
    values["held_bytes"] = [(f'{{tier="{tier}"}}', nbytes) for tier, nbytes in sorted(ledger.sizes.items())]
    lines = []
    for name, (kind, text) in _HELP.items():
        full = f"stepwell_longctx_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{labels} {value:.15g}" for labels, value in values[name]]
    return "\n".join(lines) + "\n"
