"""What a person asks of a running well: is it there, what does it hold, end it. Blocking, one connection per call.

The well is that of a home, or the one that listens at `socket` if its operator gave it a path.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from socket import socket as Socket
from typing import TypeVar

from stepwell.client.socket import connect, peer, send_hello
from stepwell.client.start import absent_at, lock, rendezvous
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
    Ping,
    Pong,
    Refused,
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


def stats(home: Path, seconds: float = 2.0, socket: Path | None = None) -> dict[str, int | float | str]:
    """The well's flat table of counts and sizes. Raises as `ping` does."""
    with _admin(home, socket, seconds) as well:
        return well.ask(StatsQuery(), Stats).values


def namespaces(home: Path, seconds: float = 10.0, socket: Path | None = None) -> list[NamespaceRow]:
    """What each namespace holds in the well's host memory, the largest first. Raises as `ping` does."""
    with _admin(home, socket, seconds) as well:
        return well.ask(NamespacesQuery(), Namespaces).rows


def decisions(home: Path, most: int, seconds: float = 10.0, socket: Path | None = None) -> list[DecisionRow]:
    """The last decisions to recall or to recompute, the latest first. Raises as `ping` does, and AccessDenied SW-606 if
    they are not ours to see."""
    with _admin(home, socket, seconds) as well:
        return well.ask(DecisionsQuery(most), Decisions).rows


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


def stop(home: Path, seconds: float = 10.0, socket: Path | None = None) -> None:
    """Ends the well; returns when it is gone and another may start, or has: an engine that is connected needs but a
    moment. Raises as `ping` does, and AccessDenied SW-606 if it is not ours to end."""
    with _admin(home, socket, seconds) as well:
        well.ask(Stop(), Stopping)
        deadline, pid = time.monotonic() + seconds, well.pid
    place = place_of(home, socket)
    while True:
        with lock(place.lock) as taken:
            if taken is not None or pid_at(place.socket) not in (None, 0, pid):
                return
        if time.monotonic() >= deadline:
            raise _silent(pid, f"it has not ended {seconds:g} s after it was asked to")
        time.sleep(_POLL_SECONDS)


def pid(home: Path) -> int | None:
    """The process of the well of `home`, 0 if it is not visible from here, None if none listens."""
    return pid_at(rendezvous(home).socket)


def pid_at(path: Path) -> int | None:
    """As `pid`, of whoever listens at `path`."""
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

    def __init__(self, sock: Socket, until: float) -> None:
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
    try:
        sock = connect(place_of(home, socket).socket, seconds)
    except BackendDown as error:
        if error.code == "SW-505":
            raise (_absent(home) if socket is None else absent_at(socket)) from error
        raise
    with sock:
        well = _Admin(sock, until)
        try:
            send_hello(sock, Hello(PROTOCOL, "admin"))
            well.await_(Welcome)
            yield well
        except TimeoutError:
            raise _silent(well.pid, "it is stopped, or too busy") from None


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
