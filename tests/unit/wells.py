"""Wells, members and their hellos for the tests of both ends of the socket."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from typer.testing import CliRunner

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.cli.commands import app
from stepwell.errors import StepwellError
from stepwell.hierarchy.core import Limits, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.clock import MonotonicClock
from stepwell.io.memory import SystemMemory
from stepwell.protocol import wire
from stepwell.protocol.messages import PROTOCOL, FromWell, Hello, Message
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.serve.loop import BARE, Linger, Loop
from stepwell.serve.server.admin import Shell
from stepwell.serve.server.gates import Gate
from stepwell.tiers.disk.site import take
from stepwell.tiers.disk.tier import DiskTier
from stepwell.units import Amount
from stepwell.vault.keyring import Keyring

PATIENCE = 20.0  # seconds until a test gives up on what must happen; never waited for in full
MIB = 1 << 20

M = TypeVar("M", bound=Message)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


@contextlib.contextmanager
def home_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a runtime directory of their own, and no settings in the environment. To end what runs there is the
    caller's."""
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as folder:  # short, as socket paths must be
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        for name in [name for name in os.environ if name.startswith("STEPWELL_")]:
            monkeypatch.delenv(name)
        yield Path(folder, "home")


def scheduler(engine: str = "engine", *, protocol: int = PROTOCOL) -> Hello:
    return Hello(
        protocol,
        "scheduler",
        engine,
        shard_bytes=MIB,
        layout=b"l" * 32,
        weights=b"w" * 32,
        model=b"m" * 32,
        block_tokens=16,
    )


def worker(engine: str = "engine") -> Hello:
    return Hello(PROTOCOL, "worker", engine, shard_bytes=MIB, layout=b"l" * 32)


class Recorder:
    """A receiver that keeps what it gets. Descriptors are the test's to close."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[FromWell, Sequence[int]]] = queue.SimpleQueue()
        self.lost_calls = 0
        self.ended = threading.Event()

    def received(self, message: FromWell, fds: Sequence[int]) -> None:
        self.messages.put((message, fds))

    def lost(self) -> None:
        self.lost_calls += 1
        self.ended.set()

    def next(self, kind: type[M]) -> tuple[M, Sequence[int]]:
        """The next message, which must be of this kind, with its descriptors."""
        message, fds = self.messages.get(timeout=PATIENCE)
        assert isinstance(message, kind), message
        return message, fds


class InThread:
    """The loop with a real hierarchy on a thread of this process. `guests`: users of other tenants, at the one gate."""

    def __init__(
        self,
        folder: Path,
        linger: Linger | None = None,
        *,
        disk_bytes: int = 0,
        guests: Mapping[int, str] | None = None,
        shell: Shell = BARE,
    ) -> None:
        self.path = folder / "well.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(128)
        clock, self.wakeup = MonotonicClock(), Wakeup()
        self.executor = ThreadExecutor(self.wakeup)
        self.executors = [self.executor]
        sealing = Sealing(Keyring.open(folder / "keyring"), sealed=True, wall=time.time)
        self.tier: DiskTier | None = None
        if disk_bytes:
            self.executors.append(ThreadExecutor(self.wakeup, 2))
            site = take(folder / "disk", Amount(size=disk_bytes), Amount(size=0))
            self.tier = DiskTier([site], self.executors[-1], clock, time.time, sealing)
        self.hierarchy = Hierarchy(
            Limits(64 * MIB),
            System(clock, self.executor, SystemMemory()),
            sealing,
            well="test",
            tiers=(self.tier,) if self.tier is not None else (),
        )
        ours = frozenset((os.geteuid(), 0))
        self.users = dict.fromkeys(ours, DEFAULT_TENANT) | dict(guests or {})
        gate = Gate(listener, self.users, ours)
        self.loop = Loop(self.hierarchy, [gate], clock, self.executors, self.wakeup, linger=linger, shell=shell)
        self.hierarchy.recover()
        self.why = ""
        self.thread = threading.Thread(target=self._run, daemon=True)  # a test that fails must not hang
        self.thread.start()

    def _run(self) -> None:
        self.why = self.loop.run()

    def close(self) -> None:
        self.loop.stop("the test is over")
        self.wakeup.wake()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        assert all([executor.close(PATIENCE) for executor in self.executors])  # noqa: C419 - close them all
        self.hierarchy.close()
        self.wakeup.close()


class Raw:
    """A peer without manners: sends any bytes, reads what comes."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(path))
        self._reader = wire.Reader(wire.from_well)
        self._messages: list[FromWell] = []

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(wire.frame(message) for message in messages))

    def read(self) -> FromWell | None:
        """The next message; None at the end of the stream."""
        while not self._messages:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._messages.extend(self._reader.feed(data))
        return self._messages.pop(0)

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def well(tmp_path: Path) -> Iterator[InThread]:
    running = InThread(tmp_path)
    yield running
    running.close()


def refused(code: str, call: Callable[[], object], shown: str = "") -> None:
    """The call is, with this code and these words."""
    with pytest.raises(StepwellError) as caught:
        call()
    assert caught.value.code == code, caught.value
    assert shown in str(caught.value)


def invoke(*arguments: str) -> tuple[int, str]:
    """How the `stepwell` command with these arguments ends, and what it says; in this process, which is quicker."""
    done = CliRunner().invoke(app, list(arguments))
    if isinstance(done.exception, StepwellError):
        return 1, f"{done.output}stepwell: {done.exception}\n"
    return done.exit_code, done.output


def open_files() -> set[str]:
    """What the descriptors of this process are, but for those of what nobody has any more."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed already
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found
