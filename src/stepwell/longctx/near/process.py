"""The process that scores near the data, and the pages that it owns, as the model's process sees them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from stepwell.errors import BackendDown, as_error
from stepwell.longctx.near import wire
from stepwell.longctx.store.gate import StoreGate

PATIENCE_S = 10.0
"""Without a byte from it, after which it counts as hung."""
START_S = 60.0
"""The same for its first answer: it loads torch."""
_DEATH_S = 1.0


class Answered:
    """`sent` and `received`: bytes, heads included."""

    def __init__(self, done: wire.RequestDone, tensors: list[torch.Tensor], sent: int, received: int) -> None:
        self.usage, self.tensors, self.sent, self.received = done.usage, tensors, sent, received


class NearProcess:
    """A process that starts with the first call. Thread-safe: calls on one line wait for each other, those on two lines
    do not. After any failure (it ends, it does not answer for PATIENCE_S, a call is interrupted) it is killed, and this
    call and all later ones raise BackendDown SW-509. `close` ends it, too; calls then raise ValueError, also in a
    forked child."""

    def __init__(self, host: int | str | None, disk: str | Sequence[str] | None, patience: float = PATIENCE_S) -> None:
        self._host, self._disk = host, disk if disk is None or isinstance(disk, str) else [*map(str, disk)]
        self._patience = patience
        self._gate = StoreGate()
        self._starting = threading.Lock()
        self._locks = {"pages": threading.Lock(), "scores": threading.Lock()}
        self._lines: dict[str, socket.socket] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._gone: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the start and after the end."""
        return self._child.pid if self._child is not None and self._gone is None else None

    def call(
        self,
        line: Literal["pages", "scores"],
        request: wire.Request,
        tensors: Sequence[torch.Tensor] = (),
        *,
        pinned: bool = False,
    ) -> Answered:
        """Raises what the request raised there: a StepwellError, or ValueError. And BackendDown SW-509."""
        with self._gate:
            with self._starting:
                if self._child is None:
                    self._start()
            with self._locks[line]:
                answer = self._exchange(line, request, tensors, pinned)
        return answer

    def close(self) -> None:
        """Kills it, and gives back what belonged to it here. Idempotent. A forked child does not end it: it is not its
        own."""
        self._end("it was closed")  # threads that wait for an answer get an error
        if self._gate.close():
            for line in self._lines.values():
                line.close()

    def _exchange(
        self, line: str, request: wire.Request, tensors: Sequence[torch.Tensor], pinned: bool = False
    ) -> Answered:
        if self._gone is not None:
            raise _down(self._end(self._gone))  # it may have been started since
        try:
            sent = wire.send(self._lines[line], request, tensors)
            answer, found, received = wire.receive(self._lines[line], pinned=pinned)
        except TimeoutError:
            raise _down(self._end(f"it did not answer within {self._patience:g} s, and was killed")) from None
        except (OSError, EOFError):
            raise _down(self._end(self._how())) from None
        except BaseException:
            self._end("a call was interrupted in the middle")
            raise
        match answer:
            case wire.RequestDone():
                return Answered(answer, found, sent, received)
            case wire.RequestRefused():
                raise as_error(answer.code, answer.what, answer.why, answer.fix)
            case wire.Wrong():
                raise ValueError(answer.why)
            case _:
                raise _down(self._end(getattr(answer, "why", "its answer is none")))

    def _start(self) -> None:
        theirs: list[socket.socket] = []
        try:
            for name in self._locks:
                self._lines[name], other = socket.socketpair()
                theirs.append(other)
            fds = [other.fileno() for other in theirs]
            package = str(Path(__file__).resolve().parents[3])  # the very package that runs here
            path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
            boot = str(Path(__file__).with_name("boot.py"))
            self._child = subprocess.Popen(
                [sys.executable, "-P", boot, *map(str, fds), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the model's process, which then ends this one
            )
        except OSError as error:
            for mine in self._lines.values():
                mine.close()
            raise _down(f"it did not start: {error.strerror or error}") from error
        finally:
            for other in theirs:
                other.close()
        hello = wire.NearHello(self._host, self._disk, torch.get_num_threads(), sys.path)
        self._lines["scores"].settimeout(START_S)
        self._exchange("scores", hello, ())
        for mine in self._lines.values():
            mine.settimeout(self._patience)

    def _end(self, why: str) -> str:
        """Ends the process; the reason, which is the first one given."""
        if self._gone is None:
            self._gone = why
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # nothing kills what waits for a hung disk
                self._child.wait(_DEATH_S)
        return self._gone

    def _how(self) -> str:
        """The process's exit, for a message, after its line was closed."""
        assert self._child is not None
        try:
            status = self._child.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            return "it closed its end of the line"
        return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"


def _down(why: str) -> BackendDown:
    return BackendDown(
        "SW-509",
        what="the process that scores near the data is gone, and the cold pages with it",
        why=why,
        fix="start the generation again; look for what ends processes here, such as too little memory",
    )


class NearPages:
    """A PageStore: as `Tiers` in the other process, whose errors are raised here. Where that process is gone, its pages
    are: `put`, `get` and `retain` raise BackendDown SW-509, and there is nothing to free or to close."""

    def __init__(self, process: NearProcess, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._process = process
        self._pinned = torch.cuda.is_available()
        process.call("pages", wire.Open(page_bytes))

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        return self._process.call("pages", wire.Put(self.page_bytes), [payload]).tensors[0]

    def get(self, places: torch.Tensor) -> torch.Tensor:
        return self._process.call("pages", wire.Get(self.page_bytes), [places], pinned=self._pinned).tensors[0]

    def retain(self, places: torch.Tensor) -> None:
        self._process.call("pages", wire.Retain(self.page_bytes), [places])

    def free(self, places: torch.Tensor) -> None:
        with contextlib.suppress(BackendDown):
            self._process.call("pages", wire.Free(self.page_bytes), [places])

    def bytes_by_tier(self) -> dict[str, int]:
        """Nothing, where the process is gone."""
        with contextlib.suppress(BackendDown):
            return self._process.call("pages", wire.Usage(self.page_bytes)).usage
        return {}

    def close(self) -> None:
        with contextlib.suppress(BackendDown):
            self._process.call("pages", wire.Close(self.page_bytes))
