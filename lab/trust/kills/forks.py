"""A process that has imported what wells and engines need and forks one for each life: `python -m ...kills.forks`.

    {"role": "well", "home": ..., "settings": {...}, "held": false}      in, a line on standard input
    {"pid": 4711}  {"ready": true}  {"refused": "SW-506", "what": ...}  {"status": -9}      out, a line each

What a well or an engine must not inherit it does not: the server has one thread, no socket, no memory of the tier and
no lock. With `held` a life waits for one more byte before it begins, so that it can be traced or limited first. A life
ends with its server, and the server with its input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lab.trust.kills import victims
from stepwell.config import load
from stepwell.errors import StepwellError
from stepwell.io.process.parent import end_with_parent
from stepwell.serve.process import run

Order = dict[str, Any]

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


def main() -> None:
    end_with_parent()  # while a life goes on, nobody reads the input
    gc.freeze()
    while line := _line():
        order: Order = json.loads(line)
        server, child = os.getpid(), os.fork()
        if not child:
            _live(order, server)
        _, status = os.waitpid(child, 0)
        say(status=os.waitstatus_to_exitcode(status))


def say(**what: object) -> None:
    """One line to whoever ordered this life. The server speaks only when it is over. By a call that no well makes, so
    that none of a well's that is hindered is this one."""
    os.writev(1, [json.dumps(what).encode() + b"\n"])


def _line() -> bytes:
    """Byte by byte, because what follows may be the child's to read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def _live(order: Order, server: int) -> NoReturn:
    status = 1
    try:
        say(pid=os.getpid())
        end_with_parent()
        ctypes.CDLL(None).prctl(
            _PR_SET_PTRACER, _ANY, 0, 0, 0
        )  # any process of this user may trace it, where the system asks
        if os.getppid() == server and (not order["held"] or os.read(0, 1)):
            ROLES[order["role"]](order)
            status = 0
    except StepwellError as error:
        say(refused=error.code, what=str(error))
        status = 0
    except BaseException:  # noqa: BLE001 - told to whoever ordered this life; nothing may return from here
        traceback.print_exc()
    finally:
        os._exit(status)


def _well(order: Order) -> None:
    home = Path(order["home"])
    settings = load(home, {}, overrides=order["settings"]).settings
    run(home, settings, ready=lambda at: say(ready=True))


def _victim(order: Order) -> None:
    victims.run(order, lambda: say(ready=True))


ROLES: dict[str, Callable[[Order], None]] = {"well": _well, "engine": _victim}


if __name__ == "__main__":
    main()
