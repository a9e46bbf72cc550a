"""`stepwell pause`, `stepwell resume` and `stepwell reload`: a running well is changed without ending it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stepwell.cli.options import Home, Json, Socket, home_of, socket_of
from stepwell.cli.output import emit
from stepwell.errors import BackendDown
from stepwell.hierarchy.pauses import MAX_REASON, one_line
from stepwell.hierarchy.saved import KINDS, Kind, PauseRecord
from stepwell.protocol.messages import Paused, PauseRow


class What(StrEnum):
    RECALLS = "recalls"
    SPILLS = "spills"
    ALL = "all"


Kinds = Annotated[What, typer.Argument(help="What to switch: recalls, spills or all.")]


def pause(
    what: Kinds = What.ALL,
    reason: Annotated[
        str, typer.Option(help=f"Why it is paused, for other people: at most {MAX_REASON} characters.")
    ] = "",
    home: Home = None,
    socket: Socket = None,
    as_json: Json = False,
) -> None:
    """Switch recalls, spills or both off, at once.

    Engines compute everything, and nothing that is stored is lost. The pause lasts until `stepwell resume`, whatever
    ends or restarts. Where no well runs, the next one starts paused. JSON:
    {"paused": [{"kind", "since" (seconds since 1970), "uid", "reason"}], "kept": home has it, so that it lasts}.
    """
    from stepwell.client import control
    from stepwell.ops import switch

    place, kinds = home_of(home), _kinds(what)
    try:
        answer = control.pause(place, [*kinds], one_line(reason), socket=socket_of(socket, place))
    except BackendDown as error:
        if not _absent(error, place, socket):
            raise
        _tell_next(switch.pause(place, kinds, reason), as_json)
    else:
        _tell(answer, place, as_json, "this is in force, and ends with the well")


def resume(what: Kinds = What.ALL, home: Home = None, socket: Socket = None, as_json: Json = False) -> None:
    """End a pause.

    What is stored is recalled again, and what is computed is spilled again. JSON: as for `stepwell pause`.
    """
    from stepwell.client import control
    from stepwell.ops import switch

    place, kinds = home_of(home), _kinds(what)
    try:
        answer = control.resume(place, [*kinds], socket=socket_of(socket, place))
    except BackendDown as error:
        if not _absent(error, place, socket):
            raise
        _tell_next(switch.resume(place, kinds), as_json)
    else:
        _tell(
            answer, place, as_json, f"{' and '.join(kinds)} go on, and the next well may begin with them paused again"
        )


def reload(home: Home = None, socket: Socket = None, as_json: Json = False) -> None:
    """Let the running well read its settings again.

    SIGHUP does the same. Changed settings that need a restart of the well are named.

    JSON: {"live": [{"name", "was", "is"}], "restart": [name]}.
    """
    from stepwell.client import control
    from stepwell.serve.reload import line

    place = home_of(home)
    answer = control.reload(place, socket=socket_of(socket, place))
    live = [{"name": name, "was": before, "is": now} for name, before, now in answer.live]
    emit({"live": live, "restart": answer.restart}, as_json=as_json, text=line(answer.live, answer.restart))


def _kinds(what: What) -> list[Kind]:
    return [kind for kind in KINDS if what in (What.ALL, kind)]


def _absent(error: BackendDown, home: Path, socket: Path | None) -> bool:
    """True if no well of `home` runs and its home is known: it is not for a well that is named by its socket."""
    return error.code == "SW-505" and socket is None and home.exists()


def _tell_next(pauses: list[PauseRecord], as_json: bool) -> None:
    answer = Paused([PauseRow(p.kind, p.since, p.uid, p.reason) for p in pauses], kept=True)
    rows = [msgspec.structs.asdict(row) for row in answer.rows]
    text = f"{told(answer)}\nno well runs: the next one begins so"
    emit({"paused": rows, "kept": True}, as_json=as_json, text=text)


def _tell(answer: Paused, home: Path, as_json: bool, unkept: str) -> None:
    """Prints the answer. `unkept`: the consequence if home does not have it, for the error."""
    rows = [msgspec.structs.asdict(row) for row in answer.rows]
    emit({"paused": rows, "kept": answer.kept}, as_json=as_json, text=told(answer))
    if not answer.kept:
        raise BackendDown(
            "SW-512",
            what=unkept,
            why=f"it is not written in {home} yet: that is full, cannot be written, is slow or does not answer",
            fix="repeat the command, which may find it written; else see the well's log, and correct that first",
        )


def told(answer: Paused) -> str:
    """All pauses as lines for people."""
    lines = [f"paused: {PauseRecord(row.kind, row.since, row.uid, row.reason)}" for row in answer.rows]  # type: ignore[arg-type]
    return "\n".join(lines) or "nothing is paused"
