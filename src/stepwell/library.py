"""`stepwell.open()`: a cache of whole blocks for libraries, in a well of their own or in one that runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from stepwell.client.blocks import OPEN_S, BlockClient
from stepwell.client.kv_model import KvModel
from stepwell.client.socket import dial
from stepwell.client.start import find, find_named
from stepwell.errors import ConfigError
from stepwell.hierarchy.local import open_threaded
from stepwell.io.paths import Rendezvous, home_dir
from stepwell.protocol.link import Dial

Named = str | os.PathLike[str]


def open_blocks(
    model: KvModel,
    *,
    host: str | int | None = None,
    disk: Named | None = None,
    disk_size: str | int = "10GiB",
    home: Named | None = None,
    socket: Named | None = None,
    timeout: float = OPEN_S,
) -> BlockClient:
    """A cache of this model's blocks; close it, or use it in a `with`.

    With `host`, bytes or a text such as "1GiB", the well is one of its own in this process, of so much memory: for this
    process alone, and ended by `close`. `disk`: a directory in which blocks outlive it, `disk_size` of them at most;
    `home` then keeps the keys to them.

    Without `host` the well is a running one: that whose socket is `socket`, or that of `home`, or what STEPWELL_SOCKET
    and STEPWELL_HOME name, as for engines. It is never started. While it cannot be reached blocks are missing, and
    nothing is raised; `timeout`: seconds that this call waits for it.

    Raises StepwellError for what only a person can set right."""
    if host is None:
        if disk is not None:
            raise _contradiction(
                "disk", "only a running well decides whether it has a disk", "give host as well, or no disk"
            )
        return BlockClient(model, _running(home, socket), timeout=timeout)
    if socket is not None:
        raise _contradiction("socket", "with host the well is one in this process", "give host or socket")
    well = open_threaded(
        host, home=None if home is None else Path(home), disk=None if disk is None else Path(disk), disk_size=disk_size
    )
    try:
        return BlockClient(model, lambda: well.dial, timeout=timeout, threaded=False, closed=well.close)
    except BaseException:
        well.close()
        raise


def _running(home: Named | None, socket: Named | None) -> Callable[[], Dial]:
    """A function that connects to the running well. Raises ConfigError."""
    if home is not None and socket is not None:
        raise _contradiction("home and socket", "each of them names a well", "give one of them")
    if home is None and (named := socket or os.environ.get("STEPWELL_SOCKET")):
        path = Rendezvous.named(Path(named)).socket
        return lambda: dial(find_named(path))
    place = Path(home) if home is not None else home_dir(os.environ)
    return lambda: dial(find(place))


def _contradiction(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-102", what=f"{what} cannot be given here", why=why, fix=fix)
