"""Lives of real processes: begun by a fresh interpreter or by a fork server, awaited, and killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.trust.kills.ground import Ground

PATIENCE_S = 60.0
"""Until something that must happen counts as never happening; never waited for in full."""

Wishes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` as of `subprocess`: negative for a signal. `refused`: the code of the error that it named instead of
    serving, and `what` that said."""

    status: int
    refused: str = ""
    what: str = ""


class Life:
    """One process. `kill` is safe at any time, also after its end, and from any thread."""

    def __init__(
        self, pid: int, lines: _Lines, reap: Callable[[], int], go: Callable[[], object] = lambda: None
    ) -> None:
        self.pid = pid
        self.go = go
        """Lets a life begin that was ordered as held."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self._pidfd = -1
        self._lines = lines
        self._reap = reap
        self._lock = threading.Lock()
        self._ended: Ended | None = None
        self._refused: dict[str, Any] = {}
        self._serves = False

    def ready(self, seconds: float = PATIENCE_S) -> bool:
        """Waits until it serves; False if it has ended before. Raises TimeoutError."""
        while not self._serves and self._ended is None:
            self._hear(seconds)
        return self._serves

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def alive(self) -> bool:
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def wait(self, seconds: float = PATIENCE_S) -> Ended:
        """Its end. Raises TimeoutError."""
        while self._ended is None:
            self._hear(seconds)
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        return self._ended

    def _hear(self, seconds: float) -> None:
        match self._lines.next(seconds):
            case None:
                self._ended = Ended(self._reap())
            case {"refused": _} as said:
                self._refused = said
            case {"status": status}:
                self._ended = Ended(status, self._refused.get("refused", ""), self._refused.get("what", ""))
            case _:
                self._serves = True


class _Lines:
    """JSON objects from a pipe, one a line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """None at the end. Raises TimeoutError."""
        while b"\n" not in self._text:
            if not self._poll.poll(1000 * seconds):
                raise TimeoutError(f"nothing was said for {seconds:g} s")
            data = os.read(self._fd, 1 << 16)
            if not data:
                return None
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said


class ForkServer:
    """A server of `forks`: one life at a time. `close` ends it, and the life with it."""

    def __init__(self, ground: Ground) -> None:
        with ground.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lab.trust.kills.forks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours alone
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._lines = _Lines(self._process.stdout.fileno())

    def well(self, home: Path, wishes: Wishes, *, held: bool = False) -> Life:
        return self._begin({"role": "well", "home": str(home), "settings": dict(wishes), "held": held})

    def engine(self, *, held: bool = False, **order: Any) -> Life:
        return self._begin({"role": "engine", "held": held, **order})

    def _begin(self, order: dict[str, Any]) -> Life:
        os.write(self._in, json.dumps(order).encode() + b"\n")
        said = self._lines.next(PATIENCE_S)
        if said is None:
            raise RuntimeError("the fork server has ended")
        return Life(said["pid"], self._lines, self._process.wait, lambda: os.write(self._in, b"!"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def executed(ground: Ground, wishes: Wishes) -> Iterator[Life]:
    """A well by `stepwell serve` in a fresh interpreter; killed at the end."""
    env = os.environ | {f"STEPWELL_{name.upper()}": str(value) for name, value in wishes.items()}
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(ground.home), "--json"]
    with (
        ground.log.open("ab") as log,
        subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            yield Life(process.pid, _Lines(process.stdout.fileno()), process.wait)
        finally:
            process.kill()
