"""Entry point of the `stepwell` command. Says what is missing when its libraries are not installed."""

from __future__ import annotations

import os
import sys

from stepwell.errors import ConfigError, StepwellError


def main() -> None:
    """Exit codes: 0 done, 1 it could not be done (the first line says why), 2 wrong usage, 130 interrupted."""
    if not sys.platform.startswith("linux"):
        sys.exit(f"stepwell: what: platform {sys.platform}  why: the arena needs Linux shared memory  "
                 "fix: run it on Linux  [SW-701]")  # fmt: skip
    try:
        from stepwell.cli.commands import app
    except ImportError as error:
        sys.exit(f"stepwell: {_missing(error)}")
    try:
        app(standalone_mode=True)
    except StepwellError as error:
        if os.environ.get("STEPWELL_DEBUG"):
            raise
        sys.exit(f"stepwell: {error}")


def _missing(error: ImportError) -> StepwellError:
    return ConfigError("SW-113", what=f"the stepwell command needs {error.name or error}", why="it is not installed",
                       fix="in a clone of stepwell: pip install '.[cli]', with the pip of this environment; it is not "
                       "on a package index yet")  # fmt: skip
