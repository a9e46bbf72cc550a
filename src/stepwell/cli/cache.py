"""`stepwell cache`: what is cached is listed, checked and dropped."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from stepwell.cli.options import Config, Home, Json, Socket, home_of, settings_of, socket_of
from stepwell.cli.output import emit
from stepwell.errors import BackendDown, ConfigError
from stepwell.protocol.messages import NamespaceRow
from stepwell.units import format_size

app = typer.Typer(help="List, check or drop what is cached.", no_args_is_help=True)

_TAG_DIGITS = 32
_ALL = "all"


@app.command()
def clear(
    tier: Annotated[
        str,
        typer.Option(metavar="TIER", help="The tier to clear: host, another one that `stepwell stats` names, or all."),
    ] = _ALL,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="Clear only this namespace (`stepwell cache namespaces` lists tags)."),
    ] = None,
    home: Home = None,
    socket: Socket = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Drop cached blocks; engines compute them again.

    The running well drops them. Where none runs, the command says which files to delete instead.

    JSON: {"blocks": {tier: n}, "bytes": {tier: n}, "partial": [tier]}.
    """
    from stepwell.client import control

    place, tag = home_of(home), _tag(namespace)
    at = socket_of(socket, place, config)
    try:
        tiers = control.tiers(place, at)
        if tier not in (_ALL, *tiers):
            raise _unknown(tier, tiers)
        cleared = control.clear(place, tiers if tier == _ALL else [tier], tag, socket=at)
    except BackendDown as error:
        if error.code != "SW-505":
            raise
        raise _no_well(place, config, error) from error
    lines = [
        f"{name} tier: {blocks} blocks dropped, {format_size(cleared.nbytes[name])}"
        for name, blocks in cleared.blocks.items()
    ]
    lines += [
        f"{name} tier: some of it may come back: its storage has failed, or holds a file that may be one of ours and"
        " cannot be read, or blocks of a later release, which only a clear of the whole tier removes (`stepwell stats`,"
        " `stepwell cache fsck`). A namespace in quarantine stays in it"
        for name in cleared.partial
    ]
    emit(
        {"blocks": cleared.blocks, "bytes": cleared.nbytes, "partial": cleared.partial},
        as_json=as_json,
        text="\n".join(lines),
    )


@app.command()
def namespaces(home: Home = None, socket: Socket = None, as_json: Json = False) -> None:
    """List what host memory holds, by namespace.

    A namespace is one model as one tenant's engines run it; a tag stands for it in `stepwell cache clear`.

    JSON: {"namespaces": [{"tag", "tenant", "engines": [label], "blocks", "bytes", "quarantined",
    "nearest", "differs": [[name, here, there]], "groups": [{"kind", "layers", "span", "token_bytes",
    "resume_bytes"}]}]}; what differs from the nearest namespace that holds more blocks, and what live engines keep: of
    each token, or of a window or a state where a request goes on.
    """
    from stepwell.client import control

    place = home_of(home)
    rows = control.namespaces(place, socket=socket_of(socket, place))
    shape = [
        {
            "tag": r.tag.hex(),
            "tenant": r.tenant,
            "engines": r.engines,
            "blocks": r.blocks,
            "bytes": r.nbytes,
            "quarantined": r.quarantined,
            "nearest": r.nearest.hex(),
            "differs": r.differs,
            "groups": [
                {
                    "kind": g.kind,
                    "layers": g.layers,
                    "span": g.span,
                    "token_bytes": r.shards * g.token_bytes,
                    "resume_bytes": r.shards * g.resume_bytes,
                }
                for g in r.groups
            ],
        }
        for r in rows
    ]
    lines: list[str] = []
    for r in rows:
        lines.append(
            f"{r.tag.hex()}  {format_size(r.nbytes):>9}  {r.blocks} blocks  {', '.join(r.engines) or 'no engine'}"
            f"{', in quarantine' if r.quarantined else ''}"
        )
        lines += _kept(r) if len(r.groups) > 1 else []
    lines += identities(rows)
    emit({"namespaces": shape}, as_json=as_json, text="\n".join(lines) or "host memory holds nothing")


@app.command()
def fsck(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of a disk tier.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Open every block in a directory of the disk tier.

    Nothing is changed. The exit status is 1 if something is damaged. The keys are those of --home.

    JSON: {"ok": bool, "directory": path, "in_use": bool, "keyring": bool, "segments": {"closed", "open", "empty",
    "other_version", "damaged", "unreadable": n}, "bytes": n, "blocks": {"good", "expired", "no_key", "unknown",
    "damaged": n}, "block_bytes": n, "moved_blocks": n, "foreign_files": n}.
    """
    from stepwell.ops.fsck import examine, shape, text
    from stepwell.serve.process import KEYRING_NAME

    place = home_of(home)
    tell = (lambda line: None) if as_json else (lambda line: typer.echo(line, err=True))
    report = examine(directory, place / KEYRING_NAME, tell)
    emit(shape(report), as_json=as_json, text=text(report, place))
    if not report.ok:
        raise typer.Exit(1)


def differing(rows: list[NamespaceRow]) -> list[dict[str, Any]]:
    """What keeps live engines from blocks that their tenant has stored, for each namespace with engines, as JSON."""
    blocks = {row.tag: row.blocks for row in rows}
    return [
        {"engines": r.engines, "nearest": r.nearest.hex(), "blocks": blocks.get(r.nearest, 0), "differs": r.differs}
        for r in rows
        if r.differs
    ]


def identities(rows: list[NamespaceRow]) -> list[str]:
    """What `differing` says, a line for each namespace."""
    return [
        f"{', '.join(d['engines'])} finds nothing in {d['nearest']}, which holds {d['blocks']} blocks: "
        + "; ".join(f"{name}: {here} here, {there} there" for name, here, there in d["differs"])
        for d in differing(rows)
    ]


def _kept(row: NamespaceRow) -> Iterator[str]:
    """What is kept of layers that keep it alike, a line for each kind."""
    for name in dict.fromkeys(group.name for group in row.groups):
        alike = [group for group in row.groups if group.name == name]
        nbytes = row.shards * sum(group.resume_bytes or group.token_bytes for group in alike)
        each = "where a request goes on" if alike[0].resume_bytes else "a token"
        layers = sum(group.layers for group in alike)
        yield f"    {name}: {layers} layer{'s' * (layers != 1)}, {format_size(nbytes)} {each}"


def _tag(text: str | None) -> bytes:
    if text is None:
        return b""
    try:
        tag = bytes.fromhex(text)
    except ValueError:
        tag = b""
    if len(text) != _TAG_DIGITS or len(tag) * 2 != _TAG_DIGITS:
        raise ConfigError(
            "SW-102",
            what=f"{text[:64]!r} is no namespace",
            why=f"its tag has {_TAG_DIGITS} hexadecimal digits",
            fix="copy it from `stepwell cache namespaces`",
        )
    return tag


def _unknown(tier: str, tiers: list[str]) -> ConfigError:
    return ConfigError(
        "SW-102",
        what=f"this well has no tier called {tier[:64]!r}",
        why="it has " + " and ".join(tiers),
        fix="name one of these, or all",
    )


def _no_well(home: Path, config: Path | None, error: BackendDown) -> BackendDown:
    places = [shlex.quote(str(place.path)) for place in settings_of(home, config).disk]
    fix = "start one with `stepwell serve`"
    if places:
        fix += ", or delete what is on disk: rm " + " ".join(f"{place}/*.seg" for place in places)
    return BackendDown(
        "SW-505", what=error.what, why="so nothing is in host memory, and only a well clears its disk tier", fix=fix
    )
