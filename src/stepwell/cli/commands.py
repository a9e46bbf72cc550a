"""The commands: each a few lines over a program of its own."""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepwell import __version__
from stepwell.cli import cache, config, explain, switch, vllm
from stepwell.cli.group import SectionedGroup
from stepwell.cli.options import (
    Config,
    Disk,
    Home,
    Host,
    Json,
    Socket,
    home_of,
    options_of,
    settings_of,
    socket_of,
)
from stepwell.cli.output import emit, removed_table, stats_table, uninstall_table
from stepwell.cli.study import fidelity, fleet, simulate
from stepwell.errors import BackendDown
from stepwell.io.paths import prepare_home

app = typer.Typer(
    name="stepwell",
    cls=SectionedGroup,
    help="The memory hierarchy for the KV cache of LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(config.app, name="config")
app.add_typer(cache.app, name="cache")
app.command()(simulate.simulate)
app.command("simulate-fleet")(fleet.simulate_fleet)
app.command()(fidelity.fidelity)
app.command()(fidelity.indexes)
app.command()(explain.explain)
app.command("vllm-args")(vllm.vllm_args)
app.command()(switch.pause)
app.command()(switch.resume)
app.command()(switch.reload)


class Kind(StrEnum):
    HOME, DATA, DEMO = "home", "data", "demo"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepwell {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The memory hierarchy for the KV cache of LLM inference."""


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="Folder of a model (default: SmolLM2-135M-Instruct).")] = None,
    documents: Annotated[int, typer.Option(help="Documents to ask about.")] = 8,
    page: Annotated[int, typer.Option(help="Engine page in tokens.")] = 128,
    rounds: Annotated[int, typer.Option(help="Recalls per document, each before and after the restarts.")] = 3,
    disk: Annotated[str, typer.Option(help="Size of its disk tier in the cache folder; 0: none.")] = "4GiB",
    block_tokens: Annotated[int, typer.Option(help="Tokens in a block; 0: by the size of their KV.")] = 0,
    engine: Annotated[str, typer.Option(help="Further engine arguments of vLLM, as JSON.")] = "{}",
    as_json: Json = False,
) -> None:
    """Run a real vLLM with a well on this machine's CPU.

    It spills, recalls, kills the engine, then kills everything and recalls again: some minutes on two cores.
    """
    from stepwell.demo.results.report import show
    from stepwell.demo.run import DemoOptions, engine_arguments, run
    from stepwell.units import parse_size

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as Ctrl-C: nothing is left behind
    disk_bytes = 0 if disk.strip() == "0" else parse_size(disk)
    given = engine_arguments(engine)
    options = DemoOptions(model, documents, page, rounds, disk_bytes, engine=given, block_tokens=block_tokens)
    result = run(options)
    show(result, as_json=as_json)
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def serve(
    home: Home = None,
    host: Host = None,
    disk: Disk = None,
    config: Config = None,
    socket: Annotated[Path | None, typer.Option(help="Listen at this path; engines must be given it as well.")] = None,
    as_json: Json = False,
) -> None:
    """Run a well in the foreground.

    It ends with `stepwell stop`, SIGTERM or SIGINT.
    """
    from stepwell.config import Loaded, Settings, load
    from stepwell.serve.process import run

    place = home_of(home)
    prepare_home(place)

    def read() -> Loaded[Settings]:
        return load(place, os.environ, path=config, overrides=options_of(host, disk, socket))

    def ready(at: Path) -> None:
        emit({"serving": str(at), "home": str(place)}, as_json=as_json, text=f"serving {place} at {at}")

    loaded = read()
    reread, warnings = lambda: read().settings, loaded.warnings
    why = run(place, loaded.settings, ready=ready, reread=reread, warnings=warnings)
    emit({"ended": why}, as_json=as_json, text=f"the well has ended: {why}")


@app.command()
def stop(home: Home = None, socket: Socket = None, as_json: Json = False) -> None:
    """End the running well.

    What it holds in host memory is gone. Engines go on without it.
    """
    from stepwell.client import control

    place = home_of(home)
    at = socket_of(socket, place)
    control.stop(place, socket=at)
    emit({"stopped": str(at or place)}, as_json=as_json, text=f"stopped the well {f'at {at}' if at else f'of {place}'}")


@app.command()
def stats(home: Home = None, socket: Socket = None, as_json: Json = False) -> None:
    """Show what the running well holds and has counted.

    Blocks and bytes of each tier, hits, misses by reason, pins, quarantine. JSON: one object of numbers and texts.
    """
    from stepwell.client import control

    place = home_of(home)
    figures = control.figures(place, socket=socket_of(socket, place))
    emit(figures.flat(), as_json=as_json, text=stats_table(figures))


@app.command()
def doctor(
    home: Home = None,
    host: Host = None,
    disk: Disk = None,
    cpu: Annotated[
        str | None, typer.Option(help="Size of vLLM's own host memory, for a well below vLLM's offloading.")
    ] = None,
    config: Config = None,
    socket: Socket = None,
    as_json: Json = False,
) -> None:
    """Try whether this machine can do what the settings ask for.

    The exit status is 1 if something cannot work.

    JSON: {"ok": bool, "checks": [{"check": name, "status": "ok", "warn" or "fail", "text", "fix", "of": directory,
    "facts": {name: number or text}}]}.
    """
    from stepwell.ops.doctor import examine, line, shape, summary
    from stepwell.units import parse_size

    checks = []
    cpu_bytes = parse_size(cpu) if cpu is not None else None
    for check in examine(home_of(home), os.environ, config, options_of(host, disk, socket), cpu_bytes):
        checks.append(check)
        if not as_json:
            typer.echo(line(check))
    emit(shape(checks), as_json=as_json, text=summary(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


@app.command()
def uninstall(
    home: Home = None,
    socket: Socket = None,
    config: Config = None,
    only: Annotated[list[Kind] | None, typer.Option(help="Delete only home, data or demo; repeatable.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """End the well and delete what stepwell has left behind.

    That is the keyring and the log in home, blocks on disk, and the demo's cache; nothing else is ever deleted. The
    command lists all of it and asks first. Without a terminal and without --yes it only lists.
    """
    from stepwell.client import control
    from stepwell.demo.model import cache_folder
    from stepwell.ops import uninstall as program

    place = home_of(home)
    settings = settings_of(place, config)
    parts = program.survey(place, [disk.path for disk in settings.disk], cache_folder())
    parts = [part for part in parts if not only or part.kind in only]
    if not as_json:
        typer.echo(uninstall_table(parts))
    asked = sys.stdin.isatty()
    if not parts or not (yes or (asked and typer.confirm("Delete what is ours of this?"))):
        hint = "" if asked or not parts else "; --yes deletes it"
        emit({"deleted": False, "parts": parts}, as_json=as_json, text=f"nothing was deleted{hint}")
        return
    at = socket.absolute() if socket else settings.socket
    try:
        control.stop(place, socket=at)
    except BackendDown as error:
        if error.code != "SW-505":
            raise
    of_tenants = [tenant.socket for tenant in settings.tenants.values()]
    removed = program.remove(place, parts, *(path for path in (at, *of_tenants) if path is not None))
    emit({"deleted": True, "parts": removed}, as_json=as_json, text=removed_table(removed))
