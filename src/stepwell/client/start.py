"""Finding the well of a home, or starting one that outlives us.

Whoever gets the lock starts the well; everybody else joins it. The lock is a flock that passes to the well with its
descriptor, so that there is no moment at which two could hold it. The well must survive an engine that kills all its
descendants when it stops, so it is started by a process that exits at once (`serve.detached`) and in a session of its
own. Nothing of the well is imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepwell.client.asking import within
from stepwell.client.holder import Holder, held_by, holder
from stepwell.client.refusal import passes, refusal
from stepwell.client.socket import connect
from stepwell.errors import AccessDenied, BackendDown, StepwellError, as_error
from stepwell.io.paths import Rendezvous, runtime_dir

START_SECONDS = 15.0
_DYING_S = 1.0
"""Seconds that a well which was killed may hold its home longer than its socket's lock: the system closes its files
one by one."""

_POLL_SECONDS = 0.02
_MAX_REPORT = 64 << 10
_LOCK_TRIES = 100

# What tunes an engine would give the well threads, preloads and devices that it has no use for.
_ENGINE_ONLY = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_PRELOAD", "VLLM_", "CUDA_", "NCCL_", "TORCH")

_held: set[int] = set()

log = logging.getLogger("stepwell")


@dataclass(frozen=True, slots=True)
class FoundWell:
    """Where the well listens. `started`: by us, so we may start it again when it is lost."""

    socket: Path
    started: bool


def rendezvous(home: Path) -> Rendezvous:
    """Socket and lock of `home` in this environment, or where its well lives that was started in another one. Raises
    AccessDenied SW-604, ConfigError SW-109 and BackendDown: SW-501 if that well cannot be reached from here, SW-514 if
    home does not answer. Blocks for some seconds at most."""
    return _seek(home)[0]


def meet(home: Path, seconds: float) -> tuple[socket.socket, Rendezvous]:
    """A socket connected to the well of `home`, and where that is. Raises as `connect` and `rendezvous` do."""
    place = _own(home)
    try:
        return connect(place.socket, seconds), place
    except BackendDown as error:
        if error.code != "SW-505" or (other := _elsewhere(home, place)) == place:
            raise
    return connect(other.socket, seconds), other


def _seek(home: Path) -> tuple[Rendezvous, bool]:
    """As `rendezvous`, and whether a well listens there."""
    place = _own(home)
    if _listens(place.socket):
        return place, True
    other = _elsewhere(home, place)
    return other, other != place and _listens(other.socket)


def _own(home: Path) -> Rendezvous:
    runtime = runtime_dir(os.environ)
    return within(home, lambda: Rendezvous.of(home, runtime))


def holder_of(home: Path) -> Holder | None:
    """The well that holds `home`. Raises as `holder` does, and BackendDown SW-514 if home does not answer."""
    return within(home, lambda: holder(home))


def _elsewhere(home: Path, place: Rendezvous) -> Rendezvous:
    """Asked only where nobody listens at `place`: home may hang while its well runs."""
    well = holder_of(home)
    if well is None or well.place is None or well.place == place:
        return place
    if not os.path.lexists(well.place.lock):
        raise held_by(home, well)
    _tell(home, well.place.socket)
    return well.place


@functools.cache
def _tell(home: Path, socket: Path) -> None:
    """Once."""
    log.warning(
        "stepwell: the well of %s is met at %s, since it was started with another XDG_RUNTIME_DIR or a socket of its "
        "own: set that alike",
        home,
        socket,
    )


def find(home: Path) -> Path:
    """The socket of the live well of `home`. Raises BackendDown SW-505 if there is none, and as `rendezvous` does."""
    place, listens = _seek(home)
    if not listens:
        raise BackendDown(
            "SW-505",
            what=f"no well is running for {home}",
            why="nobody listens on its socket",
            fix="start one with `stepwell serve`, or let an engine start it",
        )
    return place.socket


def find_named(socket: Path) -> Path:
    """`socket`, if a well listens there. Raises BackendDown SW-505 if none does, ConfigError SW-109 and what `connect`
    has to say; blocks for at most 1 s. A well with a socket of its own is its operator's to start."""
    path = Rendezvous.named(socket).socket
    if not _listens(path):
        raise absent_at(path)
    return path


def absent_at(socket: Path) -> BackendDown:
    """Nobody listens where the operator's well should."""
    return BackendDown(
        "SW-505",
        what=f"no well is running at {socket}",
        why="nobody listens there; engines join such a well and never start it",
        fix=f"start its service, or `stepwell serve --socket {socket}`; engines then join by themselves",
    )


def find_or_start(home: Path, options: Mapping[str, str | int | float], seconds: float = START_SECONDS) -> FoundWell:
    """Joins the live well of `home`, or starts one with the settings `options`. Blocks for up to `seconds`.

    Raises what kept the well from starting, as the well itself reports it (ConfigError, AccessDenied, ...), and
    BackendDown SW-502 if it reports nothing in time.
    """
    place, listens = _seek(home)
    began = time.monotonic()
    deadline = began + seconds
    while not (listens or _listens(place.socket)):
        with lock(place.lock) as taken:
            if taken is not None:
                if (well := holder_of(home)) is None:
                    _start(home, options, taken, deadline)
                    return FoundWell(place.socket, started=True)
                if time.monotonic() >= began + _DYING_S:
                    raise held_by(home, well)
        if time.monotonic() >= deadline:
            raise BackendDown(
                "SW-502",
                what="the well of this home did not begin to listen",
                fix=_see_log(home),
                why="another process holds its lock, starting or ending, and does not come to an end",
            )
        time.sleep(_POLL_SECONDS)
    return FoundWell(place.socket, started=False)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[int | None]:
    """The locked file's descriptor, or None if someone holds the lock; closed at the end. Does not wait.

    What was locked lies at `path`; only its holder may delete it. Raises AccessDenied SW-604 if it cannot be opened or
    locked, BackendDown SW-510 if this process can open no more.
    """
    for _ in range(_LOCK_TRIES):
        with _opened(path) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            except OSError as error:
                raise _lockless(path, error) from error
            if _lies_at(path, fd):
                yield fd
                return
        # Its holder deleted it after we had opened it, as `stepwell uninstall` does.
    yield None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if passes(error):
            raise refusal(error) from error
        raise AccessDenied(
            "SW-604",
            what=f"{path} cannot be opened",
            why=error.strerror or str(error),
            fix="remove it if it is yours, or set XDG_RUNTIME_DIR to a directory of your own",
        ) from error
    _held.add(fd)
    try:
        yield fd
    finally:
        # Closing, not unlocking: a well that got a copy keeps the lock.
        _held.discard(fd)
        os.close(fd)


def _lockless(path: Path, error: OSError) -> StepwellError:
    if passes(error):
        return refusal(error)
    return AccessDenied(
        "SW-604",
        what=f"{path} cannot be locked",
        why=f"its filesystem refuses: {error.strerror or error}",
        fix="have this directory on a local disk, whose filesystem has locks (flock): STEPWELL_HOME names home, and "
        "XDG_RUNTIME_DIR what holds sockets and locks",
    )


def _lies_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _drop_locks() -> None:
    """In a forked child, whose copies would hold the lock after the well's death."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks)


def _listens(path: Path) -> bool:
    try:
        connect(path).close()
    except BackendDown as error:
        return error.code != "SW-505"  # one that does not accept is there; the hello will tell
    return True


def _start(home: Path, options: Mapping[str, str | int | float], locked: int, deadline: float) -> None:
    report, write = os.pipe()
    try:
        try:
            # The well reports on its stderr until it serves, so that a traceback arrives here too.
            starter = subprocess.Popen(
                [sys.executable, "-P", "-m", "stepwell.serve.detached", os.path.abspath(home), str(locked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=write,
                cwd="/",
                env=_environment(),
                pass_fds=(locked,),
                start_new_session=True,
            )
        except OSError as error:
            raise _not_started(home, str(error)) from error
        finally:
            os.close(write)
        assert starter.stdin is not None
        with contextlib.suppress(BrokenPipeError), starter.stdin:
            starter.stdin.write(json.dumps(dict(options)).encode())
        trouble = _await(report, home, deadline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            starter.wait(timeout=1.0)  # it has exited long ago, unless something holds it
        if trouble is not None:
            raise trouble
    finally:
        os.close(report)


def _await(report: int, home: Path, deadline: float) -> StepwellError | None:
    """What kept the well from starting; None when it serves."""
    poll = select.poll()
    poll.register(report, select.POLLIN)
    text = b""
    while len(text) < _MAX_REPORT:
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            return _not_started(home, "it was not ready in time")
        data = os.read(report, 4096)
        if not data:
            break
        text += data
        for line in text.split(b"\n")[:-1]:
            if line == b'{"ready": true}':
                return None
            with contextlib.suppress(msgspec.MsgspecError):
                fields = msgspec.json.decode(line, type=dict[str, str])
                return as_error(fields["code"], fields["what"], fields["why"], fields["fix"])
    last = text.decode("utf-8", "replace").strip().splitlines()[-1:]
    return _not_started(home, f"it ended: {last[0][:300]}" if last else "it ended without a word")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_ENGINE_ONLY)}
    return kept | {"OPENBLAS_NUM_THREADS": "1"}


def _not_started(home: Path, why: str) -> BackendDown:
    return BackendDown("SW-502", what="the well did not start", why=why, fix=_see_log(home))


def _see_log(home: Path) -> str:
    return f"look into {home}/stepwell.log, or run `stepwell serve` to see it start"
