"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stepwell.io.paths import home_dir

Home = Annotated[Path | None, typer.Option(help="Home of the well (default: $STEPWELL_HOME, else the user's data).")]
Socket = Annotated[Path | None, typer.Option(help="Where the well listens (default: its setting, else by home).")]
Config = Annotated[Path | None, typer.Option(help="Settings file (default: stepwell.yaml in home).")]
Disk = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH:SIZE", help='Directory of the disk tier, such as "/nvme/stepwell:200GiB"; repeatable.'),
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def home_of(given: Path | None) -> Path:
    """The home that is meant. Raises ConfigError SW-102 as `home_dir` does."""
    return given if given is not None else home_dir(os.environ)


def socket_of(given: Path | None, home: Path, config: Path | None = None) -> Path | None:
    """Where the well of `home` listens, if its operator gave it a place. Raises ConfigError as `config.load` does."""
    from stepwell.config import load

    return given.absolute() if given is not None else load(home, os.environ, path=config).settings.socket
