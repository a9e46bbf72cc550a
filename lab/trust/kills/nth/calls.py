"""System calls of a living well that kill it, fail or lie at the N-th time: by strace, nothing of it in the product."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from lab.trust.kills.processes import PATIENCE_S

_POLL_S = 0.002


def why_not() -> str:
    """Why no system call can be hindered here; empty if they can."""
    program = shutil.which("strace")
    if program is None:
        return "strace is not installed"
    tried = subprocess.run(
        [program, "-f", "-qq", "-o", "/dev/null", "-e", "inject=getppid:error=EPERM:when=9", "true"],
        capture_output=True,
        check=False,
        text=True,
    )
    return "" if tried.returncode == 0 else f"strace cannot trace: {tried.stderr.strip()[-200:]}"


class Hindered:
    """`hits`: how many calls were hindered so far; a call that killed is not among them."""

    def __init__(self, log: Path) -> None:
        self._log = log

    @property
    def hits(self) -> int:
        return self._log.read_bytes().count(b"(INJECTED)")


@contextlib.contextmanager
def hindered(pid: int, log: Path, call: str, how: str, n: int) -> Iterator[Hindered]:
    """The N-th call of each thread of `pid` does `how`, as strace writes it: `signal=SIGKILL`, `error=EIO`,
    `retval=4096` (the call is then not made). strace has attached when this begins, and has ended at the end; `log` is
    written over. Raises RuntimeError where it cannot attach."""
    log.write_bytes(b"")
    inject = f"inject={call}:{how}:when={n}"
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={call}", "-e", inject, "-e", "signal=none"]
    with subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, start_new_session=True) as tracer:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _traced(pid):
                if tracer.poll() is not None or time.monotonic() > deadline:
                    assert tracer.stderr is not None
                    tracer.kill()
                    raise RuntimeError(f"strace does not attach: {tracer.stderr.read().decode(errors='replace')}")
                time.sleep(_POLL_S)
            yield Hindered(log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                tracer.send_signal(signal.SIGTERM)  # it lets go of a process that lives
            try:
                tracer.wait(5)
            except subprocess.TimeoutExpired:
                tracer.kill()


def _traced(pid: int) -> bool:
    with open(f"/proc/{pid}/status", "rb") as file:
        return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in file)


def limit_files(pid: int, most: int) -> None:
    """The process may open so many files, those that it has included."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
