"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepwell.io.paths import home_dir

if TYPE_CHECKING:
    from stepwell.config import Settings

Home = Annotated[
    Path | None, typer.Option(help="Home of the well (default: $STEPWELL_HOME, else in the user's data directory).")
]
Socket = Annotated[
    Path | None, typer.Option(help="Socket of the well (default: the setting, else the one that belongs to home).")
]
Config = Annotated[Path | None, typer.Option(help="Settings file (default: stepwell.yaml in home).")]
Disk = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH:SIZE", help='Directory of the disk tier, such as "/nvme/stepwell:200GiB"; repeatable.'),
]
Host = Annotated[str | None, typer.Option(help='Size of the host tier, such as "16GiB" or "25%".')]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Open = Annotated[int | None, typer.Option("--open", help="Conversations open at once, where traces leave that open.")]
BlockTokens = Annotated[int | None, typer.Option(help="Tokens of a block (default: what the trace says).")]
TraceFormat = Annotated[
    str | None, typer.Option("--format", help="Format of the trace, if its first line does not show it.")
]
StrictTrace = Annotated[bool, typer.Option("--strict", help="Stop at the first malformed line.")]


def home_of(given: Path | None) -> Path:
    """The home that was given, else the default one. Raises ConfigError SW-102 as `home_dir` does."""
    return given if given is not None else home_dir(os.environ)


def joined(disk: list[str] | None) -> str | None:
    """The values of `--disk` as the one text that a setting or an engine's flag takes."""
    return ",".join(disk) if disk else None


def options_of(host: str | None, disk: list[str] | None, socket: Path | None) -> dict[str, object]:
    """Settings that options give, None where one was not given: the overrides that `config.load` takes."""
    return {"host": host, "disk": joined(disk), "socket": socket and socket.absolute()}


def socket_of(given: Path | None, home: Path, config: Path | None = None) -> Path | None:
    """The socket that was given, or that the settings of `home` name; None if a well holds home, which then says where
    it listens, or if the settings name none. Raises as `settings_of` does."""
    from stepwell.client.start import holder_of

    if given is not None:
        return given.absolute()
    return None if holder_of(home) is not None else settings_of(home, config).socket


def settings_of(home: Path, config: Path | None = None) -> Settings:
    """Raises ConfigError as `config.load` does, and BackendDown SW-514 if home does not answer."""
    from stepwell.client.asking import within
    from stepwell.config import load

    return within(home, lambda: load(home, os.environ, path=config)).settings
