"""Printed output of commands: a table for people, one line of JSON for programs; 80 columns, without colour."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from stepwell.block.tier import Figures, WellStats
from stepwell.units import format_size

if TYPE_CHECKING:
    from stepwell.ops.uninstall import Kind, LeftFolder, Removed


def emit(values: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    typer.echo(msgspec.json.encode(values, enc_hook=os.fspath).decode() if as_json else text)


def warn(lines: Iterable[str]) -> None:
    """Prints them on standard error."""
    for line in lines:
        typer.echo(f"stepwell: {line}", err=True)


def stats_table(stats: WellStats) -> str:
    """The figures of a well, grouped for reading."""
    v = dict(stats.well)
    paused = [kind for kind in ("recalls", "spills") if v.pop(f"paused_{kind}", 0)]
    because = v.pop("paused", "") or " and ".join(paused)
    switched_off = f"PAUSED: {because}; `stepwell resume` undoes it\n" if paused else ""
    if "tenant" in v:
        return (
            f"{switched_off}well {v['well']}, up {float(v['uptime_s']):.0f} s; "
            f"tenant {v['tenant']}: {v['sessions']} session(s)\n"
            f"host tier: {_size(v, 'host_bytes')} for all tenants; more is only for the well's operator"
        )
    who = f": {names}" if (names := v.pop("engines", "")) else ""
    lines = [
        f"{switched_off}well {v.pop('well')}, up {float(v.pop('uptime_s')):.0f} s, {v.pop('sessions')} session(s){who}",
        f"host tier: {_size(v, 'block_bytes')} in {v.pop('blocks')} blocks, "
        f"slabs {_size(v, 'slab_bytes')} of {_size(v, 'host_bytes')}",
        f"held: {_size(v, 'pinned_bytes')} pinned, {v.pop('leased_blocks')} blocks leased, "
        f"{v.pop('filling')} being filled, {v.pop('quarantined_slots')} slots in quarantine",
        f"recalled: {v.pop('recalled_blocks')} blocks, {_size(v, 'recalled_bytes')}; "
        f"spilled: {v.pop('spilled_blocks')} blocks, {_size(v, 'spilled_bytes')}",
        f"asked: {v.pop('requests', 0)} requests, {v.pop('hits')} blocks hit",
    ]
    for tier, figures in stats.tiers.items():
        if "capacity_bytes" in figures:  # not of one that keeps nothing
            lines += _below(dict(figures), tier)
    clean, mismatched = v.pop("canaries_clean", 0), v.pop("canaries_mismatched", 0)
    if clean or mismatched:
        lines.append(f"canaries: {clean} clean, {mismatched} not")
    if barred := v.pop("quarantined_namespaces", 0):
        lines.append(f"ALARM: {barred} namespace(s) in quarantine, with blocks of other weights (SW-406 in the log)")
    for title, prefix in (
        ("blocks missed", "misses_"), ("blocks not spilled", "spills_refused_"), ("blocks dropped", "dropped_"),
        ("counted by engines", "engine_"),
    ):  # fmt: skip
        found = {k.removeprefix(prefix): v.pop(k) for k in sorted(v) if k.startswith(prefix)}
        if found:
            lines.append(f"{title}: " + ", ".join(f"{name} {n}" for name, n in found.items()))
    if kept := _size(v, "kept_bytes") if v.get("kept_bytes") else "":
        lines.append(f"waiting for engines to unmap {kept} that were taken from them")
    trouble = v.pop("trouble", "")
    if trouble:
        lines.append(f"trouble: {trouble}")
    return "\n".join(lines)


_MEANS = {
    "home": "home: without its keyring the blocks on disk can never be read again",
    "data": "blocks on disk",
    "demo": "the demo's cache",
}


def uninstall_table(parts: Sequence[LeftFolder]) -> str:
    """The files that `stepwell uninstall` would delete, and those that it would leave."""
    lines = []
    for part in parts:
        lines.append(f"{_things(part.kind, len(part.ours), part.nbytes)} in {part.path} ({_MEANS[part.kind]})")
        if part.others:
            lines.append(f"  stays, since it is not ours: {_some(part.others)}")
    return "\n".join(lines) or "there is nothing of stepwell here"


def removed_table(removed: Sequence[Removed]) -> str:
    lines = []
    for part in removed:
        lines.append(f"deleted {_things(part.kind, len(part.names), part.nbytes)} in {part.path}")
        lines += [f"  left {name}: {why}" for name, why in part.left[:20]]
        if len(part.left) > 20:
            lines.append(f"  and {len(part.left) - 20} more")
    lines.append("the program itself: pip uninstall stepwell")
    return "\n".join(lines)


def _things(kind: Kind, count: int, nbytes: int) -> str:
    thing = "folder" if kind == "demo" else "file"
    return f"{count} {thing}{'s' * (count != 1)}, {format_size(nbytes)},"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _below(t: Figures, tier: str) -> list[str]:
    """The lines for a tier below the host tier; takes its keys out of `t`."""
    state = "".join(f", {calls.upper()} STOPPED" for calls in ("reads", "writes") if not t.pop(f"{calls}_up"))
    recalled, spilled = _seconds(t, "recall_seconds"), _seconds(t, "spill_seconds")
    segments = f" in {t.pop('segments')} segments" if "segments" in t else ""
    room = f"{_size(t, 'bytes')} of {_size(t, 'capacity_bytes')}"
    lines = [
        f"{tier} tier: {t.pop('blocks', 0)} blocks, {room}{segments}{state}",
        f"  recalled {t.pop('recalled_blocks', 0)} blocks, {_size(t, 'recalled_bytes')}{recalled}; "
        f"spilled {t.pop('spilled_blocks', 0)} blocks, {_size(t, 'spilled_bytes')}{spilled}; "
        f"{_size(t, 'write_queue_bytes')} waiting",
        f"  written to the device: {_size(t, 'device_written_bytes')}; evicted {t.pop('evicted_blocks')} "
        f"blocks, kept {t.pop('reinserted_blocks')} that were in use",
    ]
    kept, foreign = t.pop("kept_segments", 0), t.pop("foreign_files", 0)
    if kept or foreign:
        lines.append(
            f"  {kept} segments that cannot be read (`stepwell cache fsck` says why), {foreign} files not of ours"
        )
    for title, prefix in (("not recalled", "not_recalled_"), ("not spilled", "skipped_"), ("errors", "errors_")):
        found = {k.removeprefix(prefix): t.pop(k) for k in sorted(t) if k.startswith(prefix)}
        if found:
            lines.append(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in found.items()))
    return lines


def _seconds(values: Figures, key: str) -> str:
    seconds = float(values.pop(key, 0.0))
    return f" in {seconds:.1f} s" if seconds else ""


def _size(values: Figures, key: str) -> str:
    return format_size(int(values.pop(key, 0)))
