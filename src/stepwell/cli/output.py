"""How commands print: a table for people, one line of JSON for programs. 80 columns, no colour needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import typer

from stepwell.units import format_size


def emit(values: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    typer.echo(msgspec.json.encode(values).decode() if as_json else text)


def stats_table(values: Mapping[str, int | float | str]) -> str:
    """The flat table of `stats`, grouped for reading."""
    v = dict(values)
    lines = [
        f"well {v.pop('well')}, up {float(v.pop('uptime_s')):.0f} s, {v.pop('sessions')} session(s)",
        f"host tier: {_size(v, 'block_bytes')} in {v.pop('blocks')} blocks, "
        f"slabs {_size(v, 'slab_bytes')} of {_size(v, 'host_bytes')}",
        f"held: {_size(v, 'pinned_bytes')} pinned, {v.pop('leased_blocks')} blocks leased, "
        f"{v.pop('filling')} being filled, {v.pop('quarantined_slots')} slots in quarantine",
        f"recalled: {v.pop('recalled_blocks')} blocks, {_size(v, 'recalled_bytes')}; "
        f"spilled: {v.pop('spilled_blocks')} blocks, {_size(v, 'spilled_bytes')}",
        f"asked: {v.pop('requests', 0)} requests, {v.pop('hits')} blocks hit",
    ]
    for title, prefix in (
        ("blocks missed", "misses_"), ("blocks not spilled", "spills_refused_"), ("blocks dropped", "dropped_"),
        ("counted by engines", "engine_"),
    ):  # fmt: skip
        found = {k.removeprefix(prefix): v.pop(k) for k in sorted(v) if k.startswith(prefix)}
        if found:
            lines.append(f"{title}: " + ", ".join(f"{name} {n}" for name, n in found.items()))
    trouble = v.pop("trouble", "")
    if trouble:
        lines.append(f"trouble: {trouble}")
    return "\n".join(lines)


def _size(values: dict[str, int | float | str], key: str) -> str:
    return format_size(int(values.pop(key)))
