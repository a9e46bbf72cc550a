"""`stepwell explain`: decisions of the well, in words."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from stepwell.cli.cache import differing, identities
from stepwell.cli.options import Home, Json, Socket, home_of, socket_of
from stepwell.cli.output import emit
from stepwell.protocol.messages import DecisionRow, PlaceRow
from stepwell.units import format_size

_WHY = {
    "worth_it": "recalling was expected to be faster",
    "recompute_cheaper": "computing was expected to be faster",
    "unknown": "not enough is known yet to compare, so it was recalled and timed",
    "always": "the mode is always",
    "never": "the mode is never",
}
_UNTOLD = "what computing costs is not known (below vLLM's offloading it never is), so what was found was recalled"
_GAVE_UP = {
    "late": "given up on the way: the rest would have taken longer than computing it",
    "limit": "given up: it had taken as long as it was worth, or nothing came any more",
    "no_place": "the request could not go on behind more of it",
}


def explain(
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Explain decisions to recall or to recompute, the latest first.")
    ] = True,
    last: Annotated[int, typer.Option("--last", min=1, max=256, help="Number of decisions.")] = 10,
    home: Home = None,
    socket: Socket = None,
    as_json: Json = False,
) -> None:
    """Explain why prefixes were recalled or computed.

    For each of the last decisions: what the well expected, what it chose, and how that went.

    JSON: {"decisions": [{"number", "at_s", "tokens", "block_tokens", "blocks": {tier: n}, "queued": {tier: bytes},
    "recall", "why", "limit_s", "doubt", "busy_s", "recall_s", "rest_s", "whole_s", "whole_rest_s", "none_s", "ended",
    "recalled", "waited_s", "read_s", "gave_up", "regret_s", "prefix", "no_place": {"blocks", "places", "tried",
    "missing": [[group, places]]}}], "paused": [kind], "differing": [{"engines": [label], "nearest", "blocks",
    "differs": [[name, here, there]]}]}; seconds, null where nothing was known. `prefix`: of a window or a state, the
    decision on the prefix of the same request. `no_place`: why a request did not go on where its prefix ends.
    `differing`: what keeps engines from the blocks of the nearest namespace.
    """
    from stepwell.client import control

    place = home_of(home)
    at = socket_of(socket, place)
    rows, paused = control.decisions(place, last, socket=at), control.paused(place, socket=at).rows
    known = control.namespaces(place, socket=at)
    parts = list(map(told, rows)) or ["nothing was decided yet: no request of an engine had anything to recall"]
    if any(row.kind == "recalls" for row in paused):
        parts.insert(0, "recalls are paused, so nothing is decided: every request is answered `paused` and computed")
    parts += identities(known)
    made = msgspec.to_builtins([msgspec.structs.asdict(row) for row in rows])
    emit(
        {"decisions": made, "paused": [row.kind for row in paused], "differing": differing(known)},
        as_json=as_json,
        text="\n\n".join(parts),
    )


def told(row: DecisionRow) -> str:
    """One decision as lines for people."""
    held = ", ".join(f"{blocks} in {tier}" for tier, blocks in row.blocks.items())
    if row.prefix is not None:
        whose = f"the prefix of #{row.prefix}" if row.prefix else "a prefix"
        return f"#{row.number}: the window or state that goes with {whose} (blocks: {held})\n  {_outcome(row)}"
    run = sum(row.blocks.values()) * row.block_tokens
    lines = [f"#{row.number}, {row.at_s:.0f} s after the start: a prompt of {row.tokens} tokens, "
             f"of which {min(run, row.tokens)} could be recalled (blocks: {held})"]  # fmt: skip
    what = f"recall {row.recall} blocks" if row.recall else "recall nothing"
    why = _UNTOLD if row.why == "unknown" and row.none_s is None else _WHY.get(row.why, row.why)
    lines.append(f"  decided: {what}; {why}")
    if row.none_s is not None and row.whole_s is not None and row.whole_rest_s is not None:
        lines.append(f"  expected: {_s(row.none_s)} to compute it all; to recall all of it {_s(row.whole_s)} and "
                     f"{_s(row.whole_rest_s)} for the rest{_doubt(row)}")  # fmt: skip
        if 0 < row.recall < sum(row.blocks.values()) and row.recall_s is not None and row.rest_s is not None:
            lines.append(f"  expected of the part: {_s(row.recall_s)} to recall it and {_s(row.rest_s)} for the rest")
    if queued := {tier: n for tier, n in row.queued.items() if n}:
        lines.append("  before it in line: " + ", ".join(f"{format_size(n)} of {t}" for t, n in queued.items()))
    if row.busy_s >= 0.001:
        lines.append(f"  before that its engine computes for others, for {_s(row.busy_s)}")
    lines.append("  " + _outcome(row))
    return "\n".join(lines)


def _outcome(row: DecisionRow) -> str:
    if not row.ended:
        return "it has not ended yet"
    if not row.waited_s:
        return "its request did not need it after all"
    came = f"{row.recalled} blocks came" if row.recalled else "nothing was recalled"
    read = f", read in {_s(row.read_s)}" if row.read_s else ""
    regret = f"; {_s(row.regret_s)} longer than the best choice in hindsight" if row.regret_s is not None else ""
    gave_up = f"; {_GAVE_UP.get(row.gave_up, row.gave_up)}" if row.gave_up else ""
    outcome = f"outcome: {came}{read}; its request waited {_s(row.waited_s)}{gave_up}{regret}"
    return f"{outcome}\n  {_no_place(row.no_place)}" if row.no_place is not None else outcome


def _no_place(row: PlaceRow) -> str:
    """Why the request does not go on where its prefix ends, and what helps the next one."""
    missing = " and ".join(f"{group} at {places}" for group, places in row.missing)
    looked = f"of the last {row.places} places to go on" if row.places > 1 else "of the one place to go on"
    why = f"something is missing of {missing} {looked}" if missing else f"parts have gone meanwhile {looked}"
    return (f"the prefix is there for {row.blocks} blocks, but a window or a state is not: {why}, of which "
            f"{row.tried} were asked for. A window is stored where a prompt ends, behind each block of an answer and "
            f"where prompts have parted, as now behind block {row.blocks}; a state, of these places, where a step of "
            "the engine ends")  # fmt: skip


def _doubt(row: DecisionRow) -> str:
    return f", give or take {100 * row.doubt:.0f} %"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
