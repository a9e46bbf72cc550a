"""How the members of a session reach their well: joined where it runs, started where that is ours to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from stepwell.client.socket import dial
from stepwell.client.start import find, find_named, find_or_start
from stepwell.protocol.link import Dial


def finder(home: Path, socket: Path | None, options: Mapping[str, str | int | float]) -> Callable[[], Dial]:
    """Joins the well of `home`, or starts it with the settings `options`; with `socket` the well that listens there,
    which its operator runs, is joined and never started. A well of `home` that we only joined is not started again by
    us: its operator does that, and until then there is nothing to join. One that we have started remains ours to start,
    though it is often found running: when a first attempt to join it has failed, for example. What is returned blocks
    for some seconds at most, and raises as `find_named`, `find` and `find_or_start` do."""
    if socket is not None:
        return lambda: dial(find_named(socket))
    ours: bool | None = None

    def reach() -> Dial:
        nonlocal ours
        if ours is False:
            return dial(find(home))
        found = find_or_start(home, options)
        ours = ours or found.started
        return dial(found.socket)

    return reach
