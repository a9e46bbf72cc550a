"""`stepwell config`: what is set, and where it was written. Nothing is created and no well is asked."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from stepwell.cli.options import Config, Home, Json, home_of
from stepwell.cli.output import emit, warn

app = typer.Typer(help="Show or check the settings a well would start with.", no_args_is_help=True)


@app.command()
def show(
    home: Home = None,
    config: Config = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Json = False,
) -> None:
    """Print each setting as it would be written.

    Values come from defaults, the settings file and the environment, in this order; the last one wins.

    JSON: {"settings": {name: value}, "origins": {name: "default", "FILE:LINE" or "env NAME"}}.
    """
    from stepwell.config import load, texts

    loaded = load(home_of(home), os.environ, path=config)
    warn(loaded.warnings)
    values = texts(loaded.settings)
    wide = max(len(f"{name}: {value}") for name, value in values.items())
    lines = [
        f"{name + ': ' + value:{wide}}  # {loaded.origins[name]}" if origin else f"{name}: {value}"
        for name, value in values.items()
    ]
    shape = {"settings": loaded.settings.model_dump(mode="json"), "origins": dict(loaded.origins)}
    emit(shape, as_json=as_json, text="\n".join(lines))


@app.command()
def check(home: Home = None, config: Config = None, as_json: Json = False) -> None:
    """Check names and values of the settings.

    If one cannot be used, the reason is printed and the exit status is 1. `stepwell doctor` tries them on the machine.

    JSON: {"ok": true, "set": [name, ...]}: the settings that are not defaults.
    """
    from stepwell.config import check_together, load
    from stepwell.config.loader import DEFAULT

    loaded = load(home_of(home), os.environ, path=config)
    warn(loaded.warnings)
    check_together(loaded.settings)
    origins: dict[str, str] = dict(loaded.origins)
    chosen = [name for name, where in origins.items() if where != DEFAULT]
    text = f"ok: {', '.join(f'{name} from {origins[name]}' for name in chosen) or 'nothing is set'}"
    emit({"ok": True, "set": chosen}, as_json=as_json, text=text)
