"""What a person asks of a running well: is it there, what does it hold, end it. Blocking, one connection per call.

The well is that of a home, or the one that listens at `socket`, and then home is not touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket as Socket
from typing import TypeVar

from stepwell.block.tier import HOST, Figures, WellStats
from stepwell.client.holder import is_locked
from stepwell.client.socket import connect, peer, send_hello
from stepwell.client.start import absent_at, meet, rendezvous
from stepwell.errors import BackendDown, ProtocolError, StepwellError, as_error
from stepwell.io.paths import Rendezvous
from stepwell.protocol import wire
from stepwell.protocol.messages import (
    PROTOCOL,
    Clear,
    Cleared,
    DecisionRow,
    Decisions,
    DecisionsQuery,
    FromWell,
    Hello,
    Message,
    NamespaceRow,
    Namespaces,
    NamespacesQuery,
    Pause,
    Paused,
    PausedQuery,
    Ping,
    Pong,
    Refused,
    Reload,
    Reloaded,
    Resume,
    Stats,
    StatsQuery,
    Stop,
    Stopping,
    Welcome,
)

_POLL_SECONDS = 0.02

Answer = TypeVar("Answer", bound=Message)


def ping(home: Path, seconds: float = 2.0, socket: Path | None = None) -> float:
    """Seconds of one round trip to the well. Raises BackendDown SW-505 (none runs), SW-503 (no answer)."""
    with _admin(home, socket, seconds) as well:
        before = time.perf_counter()
        well.ask(Ping(1), Pong)
        return time.perf_counter() - before


def figures(home: Path, seconds: float = 2.0, socket: Path | None = None) -> WellStats:
    """The well's counts and sizes. Raises as `ping` does."""
    with _admin(home, socket, seconds) as well:
        answer = well.ask(StatsQuery(by_tier=True), Stats)
        return WellStats(answer.values, answer.tiers)


def stats(home: Path, seconds: float = 2.0, socket: Path | None = None) -> Figures:
    """The well's counts and sizes in one flat table. Raises as `ping` does."""
    return figures(home, seconds, socket).flat()


def namespaces(home: Path, seconds: float = 10.0, socket: Path | None = None) -> list[NamespaceRow]:
    """What each namespace holds in the well's host memory, the largest first. Raises as `ping` does."""
    with _admin(home, socket, seconds) as well:
        return well.ask(NamespacesQuery(), Namespaces).rows


def decisions(home: Path, most: int, seconds: float = 10.0, socket: Path | None = None) -> list[DecisionRow]:
    """The last decisions to recall or to recompute, the latest first. Raises as `ping` does, and AccessDenied SW-606 if
    they are not ours to see."""
    with _admin(home, socket, seconds) as well:
        return well.ask(DecisionsQuery(most), Decisions).rows


def tiers(home: Path, socket: Path | None = None) -> list[str]:
    """Names of the well's tiers, the host tier first. Raises BackendDown as `stats` does."""
    return [HOST, *figures(home, socket=socket).tiers]


def clear(
    home: Path, tiers: list[str], namespace: bytes = b"", seconds: float = 120.0, socket: Path | None = None
) -> Cleared:
    """Drops blocks; returns when they are gone, with what went. Raises as `ping` does, with another reason when the
    well has not ended it in time, and AccessDenied SW-606 if it is not ours to clear."""
    with _admin(home, socket, seconds) as well:
        try:
            return well.ask(Clear(tiers, namespace), Cleared)
        except BackendDown as error:
            if not well.late:
                raise
            raise BackendDown(
                error.code,
                what=f"it is not all cleared after {seconds:g} s",
                why="much is there, a disk is slow or hangs, or the well is stopped",
                fix="wait: it goes on, and the well's log has the receipt (`cleared: ...`) when it has ended",
            ) from error


def pause(home: Path, kinds: list[str], reason: str, seconds: float = 4.0, socket: Path | None = None) -> Paused:
    """Nothing of these kinds begins any more. Returns all that is paused when home has it, or after half of `seconds`.
    Raises as `ping` does, and AccessDenied SW-606 if it is not ours to pause."""
    return _switch(home, Pause(kinds, reason), seconds, socket)


def resume(home: Path, kinds: list[str], seconds: float = 4.0, socket: Path | None = None) -> Paused:
    """The end of a pause; otherwise as `pause`."""
    return _switch(home, Resume(kinds), seconds, socket)


def paused(home: Path, seconds: float = 2.0, socket: Path | None = None) -> Paused:
    """All that is paused. Raises as `pause` does."""
    with _admin(home, socket, seconds) as well:
        return well.ask(PausedQuery(), Paused)


def _switch(home: Path, message: Pause | Resume, seconds: float, socket: Path | None) -> Paused:
    with _admin(home, socket, seconds) as well:
        answer = well.ask(message, Paused)
        until = time.monotonic() + seconds / 2
        while not answer.kept and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            answer = well.ask(PausedQuery(), Paused)
        return answer


def reload(home: Path, seconds: float = 10.0, socket: Path | None = None) -> Reloaded:
    """The well reads its settings again. Raises as `pause` does, and ConfigError where they cannot be used: then
    nothing has changed."""
    with _admin(home, socket, seconds) as well:
        return well.ask(Reload(), Reloaded)


def stop(home: Path, seconds: float = 10.0, socket: Path | None = None) -> None:
    """Ends the well; returns when it is gone and another may start, or has: an engine that is connected needs but a
    moment. Raises as `ping` does, and AccessDenied SW-606 if it is not ours to end."""
    with contextlib.ExitStack() as watching:
        with _admin(home, socket, seconds) as well:
            gone = watching.enter_context(_gone(well))
            well.ask(Stop(), Stopping)
            deadline = time.monotonic() + seconds
        while not gone():
            if time.monotonic() >= deadline:
                raise _silent(well.pid, f"it has not ended {seconds:g} s after it was asked to")
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _gone(well: _Admin) -> Iterator[Callable[[], bool]]:
    """Whether a well that now serves has ended: its process, or, as a device may keep that, what it held. No file is
    made for this. A lock that is free from the start is not this well's: at a socket's path, of one that is met by its
    home."""
    place, pid = well.place, well.pid
    locked = is_locked(place.lock)
    fd = None
    with contextlib.suppress(OSError, AttributeError):  # of another container, or of an old system
        fd = os.pidfd_open(pid)
    poll = select.poll()
    if fd is not None:
        poll.register(fd, select.POLLIN)

    def gone() -> bool:
        if fd is not None and poll.poll(0):
            return True
        if locked:
            return not is_locked(place.lock) or pid_at(place.socket) not in (None, 0, pid)
        return fd is None and pid_at(place.socket) is None

    try:
        yield gone
    finally:
        if fd is not None:
            os.close(fd)


def pid(home: Path) -> int | None:
    """The process of the well of `home`, 0 if it is not visible from here, None if none listens. Raises as
    `rendezvous` does."""
    return pid_at(rendezvous(home).socket)


def pid_at(path: Path) -> int | None:
    """As `pid`, for the process that listens at `path`."""
    try:
        sock = connect(path)
    except BackendDown:
        return None
    with sock:
        return peer(sock)[0]


def place_of(home: Path, socket: Path | None) -> Rendezvous:
    """Where the well of `home` is met, or the one that was told to listen at `socket`. Raises what `rendezvous` and
    `Rendezvous.named` raise."""
    return rendezvous(home) if socket is None else Rendezvous.named(socket)


class _Admin:
    """`until`: when waiting for an answer ends."""

    def __init__(self, sock: Socket, place: Rendezvous, until: float) -> None:
        self.place = place
        self._sock = sock
        self._until = until
        self._reader: wire.Reader[FromWell] = wire.Reader(wire.from_well)
        self.pid, _ = peer(sock)

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._until

    def ask(self, message: Message, kind: type[Answer]) -> Answer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its last words may wait to be read
            self._sock.sendall(wire.frame(message))
        return self.await_(kind)

    def await_(self, kind: type[Answer]) -> Answer:
        while data := self._receive():
            for answer in list(self._reader.feed(data)):  # used up, as it asks for
                if isinstance(answer, Refused):
                    raise as_error(answer.code, answer.what, answer.why, answer.fix)
                if isinstance(answer, kind):
                    return answer
                raise ProtocolError(
                    "SW-804",
                    what=f"the well answered with {type(answer).__name__}",
                    why=f"{kind.__name__} was expected",
                    fix="use the version of the running well",
                )
        raise _silent(self.pid, "it closed the connection")

    def _receive(self) -> bytes:
        try:
            self._sock.settimeout(max(1e-3, self._until - time.monotonic()))
            return self._sock.recv(1 << 16)
        except TimeoutError:
            raise _silent(self.pid, "it is stopped, or too busy") from None
        except ConnectionResetError:
            return b""


@contextlib.contextmanager
def _admin(home: Path, socket: Path | None, seconds: float) -> Iterator[_Admin]:
    until = time.monotonic() + seconds
    if socket is not None:
        sock, place = _at(socket, seconds)
    else:
        try:
            sock, place = meet(home, seconds)
        except BackendDown as error:
            if error.code == "SW-505":
                raise _absent(home) from error
            raise
    with sock:
        well = _Admin(sock, place, until)
        try:
            send_hello(sock, Hello(PROTOCOL, "admin"))
            well.await_(Welcome)
            yield well
        except TimeoutError:
            raise _silent(well.pid, "it is stopped, or too busy") from None


def _at(socket: Path, seconds: float) -> tuple[Socket, Rendezvous]:
    place = Rendezvous.named(socket)
    try:
        return connect(place.socket, seconds), place
    except BackendDown as error:
        if error.code == "SW-505":
            raise absent_at(socket) from error
        raise


def _absent(home: Path) -> StepwellError:
    return BackendDown(
        "SW-505",
        what=f"no well is running for {home}",
        why="nobody listens on its socket",
        fix="start one with `stepwell serve`, or set STEPWELL_HOME to the home of the one you mean",
    )


def _silent(pid: int, why: str) -> StepwellError:
    return BackendDown(
        "SW-503",
        what=f"the well, process {pid}, does not answer",
        why=why,
        fix=f"look into its log; `kill -9 {pid}` ends it, and engines go on without",
    )
