"""A well without a parent process: `python -m stepwell.serve.detached HOME LOCK`, run by `client.start`.

The process forks and exits at once, so that its child is an orphan that no engine counts among its descendants. LOCK is
the number of the inherited descriptor that holds the home's lock; standard input carries the engine's options as JSON.
Until the well serves, standard error is the starter's pipe: one JSON line says that it does, or why it cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from stepwell.errors import ConfigError, StepwellError


def main() -> None:
    if os.fork():
        os._exit(0)
    with contextlib.suppress(OSError):  # the engine's binding to some processors is not ours
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    home, locked = Path(sys.argv[1]), int(sys.argv[2])
    try:
        _serve(home, json.load(sys.stdin), locked)
    except StepwellError as error:
        _report({"code": error.code, "what": error.what, "why": error.why, "fix": error.fix})
        sys.exit(1)


def _serve(home: Path, options: dict[str, str | int | float], locked: int) -> None:
    from stepwell.config import Loaded, Settings, load
    from stepwell.io.paths import prepare_home
    from stepwell.serve.options import ENGINE
    from stepwell.serve.process import run

    os.set_inheritable(locked, False)
    prepare_home(home)

    def read() -> Loaded[Settings]:
        return load(home, os.environ, overrides=options, origin=ENGINE)

    loaded = read()
    settings = loaded.settings
    if settings.socket is not None:
        raise ConfigError(
            "SW-102",
            what=f"this home's settings give its well a socket of its own, {settings.socket}",
            why="an engine looks for the well that it starts by home, and would not find it there",
            fix='start it with `stepwell serve` and give the engines "socket" in kv_connector_extra_config, or remove '
            "the setting",
        )
    reread, warnings = lambda: read().settings, loaded.warnings
    run(home, settings, locked=locked, linger=True, ready=_ready, reread=reread, warnings=warnings)


def _ready(_: Path) -> None:
    _report({"ready": True})
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def _report(fields: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the starter may be gone, or have waited long enough
        os.write(2, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main()
