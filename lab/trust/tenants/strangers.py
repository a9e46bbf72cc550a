"""Tenants of a real well, in a process of its own, that try to learn what another one has: by asking, and by the clock.

One thread, plain sockets, no engine: what a prober with the best view would use. A's prefixes lie in host memory, and
others only on disk; B asks for both, and for prefixes that nobody ever had, in random order. If the times of the
answers tell them apart, the area under the ROC curve (the chance that a random held one took longer than a random other
one) is not 0.5. A asks for its own in the same way, which must be told apart, or the clock would prove nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from lab.rig.well import eventually
from lab.trust.budget import Budget
from lab.trust.report import Row
from stepwell.client import control
from stepwell.client.socket import connect, send_hello
from stepwell.errors import StepwellError
from stepwell.io.memory import Mapping
from stepwell.io.process import descriptors
from stepwell.protocol import messages as m
from stepwell.protocol import wire

BAND = (0.45, 0.55)
APART = 0.9
_Z = 2.576  # of a two-sided interval of 99 %
_SHARD = 4096
_PREFIXES, _BLOCKS = 64, 96  # of each kind that A has
_ASKS = 3  # for one guess, of which the quickest counts: the machine's other work only ever makes an answer late
_PATIENCE_S = 30.0
_ASIDE_S = 0.1
_GUEST = 65534
_TOLD = {"well", "uptime_s", "tenant", "sessions", "paused_recalls", "paused_spills", "host_bytes", "pid"}


def run(budget: Budget) -> Iterable[Row]:
    if not hasattr(os, "pidfd_open"):
        yield Row("no tenant finds another's blocks in a real well", 0, 0, budget.seed, "not tried: no pidfd_open here")
        return
    with _well() as well, ExitStack() as members:
        dice = budget.dice("tenants", "strangers")
        a, b = (members.enter_context(session(path)) for path in (well.a, well.b))
        held = {kind: [_prefix(dice) for _ in range(_PREFIXES)] for kind in ("disk", "host")}
        for kind in ("disk", "host"):  # what is on disk only was in host memory before
            for prefix in held[kind]:
                a.spill(prefix)
            if kind == "disk":
                eventually(lambda: _stat(well, "disk_blocks") >= _PREFIXES * _BLOCKS, "all is on disk")
                control.clear(well.home, ["host"], socket=well.main)
        yield _hits(budget, well, a, b, held)
        yield from _timing(budget, a, b, held, dice)


def _hits(budget: Budget, well: Well, a: Session, b: Session, held: dict[str, list[bytes]]) -> Row:
    prefixes = [*held["disk"], *held["host"]]
    wrong = [f"{at}: {n} blocks of {kind}" for kind in held for at, p in enumerate(held[kind]) if (n := b.found(p)[0])]
    wrong += ["A does not find its own in host memory"] * (not a.found(held["host"][0])[0])
    wrong += ["a descriptor of A's memory was given to B"] * bool(a.slabs & b.slabs)
    seen = control.stats(well.home, socket=well.b)
    wrong += [f"B is told {name}" for name in seen.keys() - _TOLD]
    for ask in (
        control.namespaces,
        lambda home, socket: control.clear(home, ["host"], socket=socket),
        lambda home, socket: control.pause(home, ["recalls"], "", socket=socket),
        lambda home, socket: control.resume(home, ["recalls"], socket=socket),
        control.reload,
    ):
        try:
            ask(well.home, socket=well.b)
            wrong.append("B may do what is the operator's")
        except StepwellError as error:
            wrong += [str(error)] * (error.code != "SW-606")
    remark, users = "asks for another's prefixes on disk and in host memory; by socket", []
    if os.geteuid() == 0:
        users = [_as_guest(well.main, prefix) for prefix in prefixes[:: len(prefixes) // 8]]
        wrong += [f"as another user: {answer}" for answer in users if answer != "0 by c"]
        remark += ", and as another user"
    else:
        remark += "; not as other users, for want of root"
    promise = "no tenant finds another's blocks in a real well"
    return Row(promise, len(prefixes) + len(users), len(wrong), budget.seed, remark, wrong[:5])


def _timing(budget: Budget, a: Session, b: Session, held: dict[str, list[bytes]], dice: Random) -> Iterator[Row]:
    guesses = budget.of(ci=1000, full=5000)
    times: dict[str, list[float]] = {"host": [], "disk": [], "never": [], "own": [], "own never": []}
    for n in range(guesses):
        if budget.over:
            break
        arms: list[tuple[str, Session, bytes]] = [
            ("host", b, dice.choice(held["host"])),
            ("disk", b, dice.choice(held["disk"])),
            ("never", b, _prefix(dice)),
            ("own", a, dice.choice(held["host"])),
            ("own never", a, _prefix(dice)),
        ]
        dice.shuffle(arms)
        for arm, who, prefix in arms:
            times[arm].append(min(who.found(prefix)[1] for _ in range(_ASKS)))
        if n % 500 == 499:
            budget.tell(f"{n + 1} guesses of each kind")
    own = auc(times["own"], times["own never"])
    blind = own.value <= APART
    for kind, where in (("host", "in host memory"), ("disk", "on disk")):
        seen = auc(times[kind], times["never"])
        wrong = [f"AUC {seen}"] * (seen.high < BAND[0] or seen.low > BAND[1])
        wrong += [f"the clock proves nothing: A's own prefixes have AUC {own}"] * blind
        yield Row(
            f"the time of a probe does not tell what another tenant has {where}",
            len(times[kind]), len(wrong), budget.seed,
            f"guesses of {_ASKS} asks; AUC {seen}, to be within {BAND[0]} to {BAND[1]}; a tenant's own: {own}", wrong,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Auc:
    """The area under the ROC curve with a 99 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def auc(ones: Sequence[float], others: Sequence[float]) -> Auc:
    """The chance that one of `ones` is larger than one of `others`, ties counted half (Mann and Whitney's U over the
    number of pairs); its variance as DeLong and others estimate it (Biometrics 44, 1988)."""
    x, y = np.asarray(ones), np.asarray(others)
    sx, sy = np.sort(x), np.sort(y)
    above = (np.searchsorted(sy, x, "left") + np.searchsorted(sy, x, "right")) / 2 / len(y)
    below = 1 - (np.searchsorted(sx, y, "left") + np.searchsorted(sx, y, "right")) / 2 / len(x)
    value = float(above.mean())
    spread = _Z * float(np.sqrt(above.var(ddof=1) / len(x) + below.var(ddof=1) / len(y)))
    return Auc(value, max(0.0, value - spread), min(1.0, value + spread))


def _prefix(dice: Random) -> bytes:
    return dice.randbytes(32 * _BLOCKS)


# --- a session without an engine --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    """One connection, read when something is expected of it."""

    sock: socket.socket
    reader: wire.Reader[m.FromWell] = field(default_factory=lambda: wire.Reader(wire.from_well))
    came: list[m.FromWell] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    @classmethod
    def join(cls, path: Path, hello: m.Hello) -> _Member:
        sock = connect(path, _PATIENCE_S)
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_hello(sock, hello, pidfd)
        finally:
            os.close(pidfd)
        return cls(sock)

    def say(self, message: m.Message) -> None:
        self.sock.sendall(wire.frame(message))

    def next(self, *kinds: type[m.Message]) -> m.FromWell:
        """The next message of these kinds; others are passed over. Raises OSError and EOFError."""
        while True:
            while self.came:
                message = self.came.pop(0)
                if isinstance(message, kinds):
                    return message
                if isinstance(message, m.Refused):
                    raise EOFError(message.what)
            data, fds, _ = descriptors.receive(self.sock, 1 << 20, 1)
            if not data:
                raise EOFError("the well has closed the connection")
            self.fds += fds
            self.came += self.reader.feed(data)


class Session:
    """A scheduler and one worker of a tenant, whose engine has no model."""

    def __init__(self, path: Path) -> None:
        layout = b"l" * 32
        self._scheduler = _Member.join(
            path, m.Hello(m.PROTOCOL, "scheduler", "e", 0, 1, _SHARD, layout, b"w" * 32, b"m" * 32, 16)
        )
        self._worker = _Member.join(path, m.Hello(m.PROTOCOL, "worker", "e", 0, 1, _SHARD, layout))
        self._scheduler.next(m.Ready)
        self._slabs: dict[int, tuple[m.SlabShared, Mapping]] = {}
        self.slabs: set[int] = set()  # inodes of their memory
        self._number = 0
        self._map()

    def _said(self, kind: type[m.Message]) -> m.FromWell:
        """The scheduler's next message of this kind. It may wait until a slab is mapped. Raises TimeoutError."""
        self._scheduler.sock.settimeout(_ASIDE_S)
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._scheduler.next(kind)
            except TimeoutError:
                if time.monotonic() > until:
                    raise
                self._settle()

    def _settle(self) -> None:
        """Maps what has been shared meanwhile."""
        with suppress(BlockingIOError):
            self._worker.sock.setblocking(False)
            while True:
                self._map()
        self._worker.sock.settimeout(_PATIENCE_S)

    def _map(self) -> None:
        shared = self._worker.next(m.SlabShared)
        assert isinstance(shared, m.SlabShared)
        fd = self._worker.fds.pop(0)
        self.slabs.add(os.fstat(fd).st_ino)
        self._slabs[shared.slab] = shared, Mapping(fd, shared.nbytes)
        os.close(fd)
        self._worker.say(m.Mapped(shared.slab))

    def spill(self, prefix: bytes) -> None:
        """Raises EOFError where the well would take less than all."""
        self._settle()
        self._number += 1
        self._scheduler.say(m.Reserve(self._number, 0, b"", prefix))
        granted = self._said(m.Granted)
        assert isinstance(granted, m.Granted)
        if not all(granted.leases):
            raise EOFError("the well has no room for what was to be probed")
        for ref in np.frombuffer(granted.slots, m.SLOT_REF):
            while int(ref["slab"]) not in self._slabs:
                self._map()
            shared, mapping = self._slabs[int(ref["slab"])]
            at = shared.offset + int(ref["slot"]) * shared.stride
            mapping.bytes[at : at + 8] = np.frombuffer(prefix[:8], np.uint8)
        self._worker.say(m.Filled(list(granted.leases), []))

    def found(self, prefix: bytes) -> tuple[int, float]:
        """Blocks that can be recalled, and the seconds until that was known. Lets them go again."""
        self._settle()
        self._number += 1
        ask = wire.frame(m.Ask(self._number, 0, self._number, prefix))
        blocks, began = 0, time.perf_counter()
        self._scheduler.sock.sendall(ask)
        while True:
            said = self._said(m.Found)
            assert isinstance(said, m.Found)
            blocks += len(said.slots) // m.SLOT_REF.itemsize
            if not said.more:
                seconds = time.perf_counter() - began
                self._scheduler.say(m.Release(self._number))
                self._scheduler.say(m.Ping(self._number))  # its end is no part of the next one's time
                self._said(m.Pong)
                return blocks, seconds

    def close(self) -> None:
        for member in (self._scheduler, self._worker):
            member.sock.close()
            for fd in member.fds:
                os.close(fd)
        for _, mapping in self._slabs.values():
            mapping.close()


@contextmanager
def session(path: Path) -> Iterator[Session]:
    opened = Session(path)
    try:
        yield opened
    finally:
        opened.close()


# --- the well ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Well:
    """Its operator's home and socket, those of tenants a and b; c is another user's at the main one."""

    home: Path
    main: Path
    a: Path
    b: Path


@contextmanager
def _well() -> Iterator[Well]:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(prefix="sw-trust-", dir="/run" if root else None) as name, ExitStack() as ending:
        folder = Path(name)
        folder.chmod(0o711 if root else 0o700)
        well = Well(folder / "home", *(folder / f"{at}.sock" for at in ("main", "a", "b")))
        well.home.mkdir(mode=0o700)
        (folder / "disk").mkdir(mode=0o700)
        third = f"\n  c: {{uids: [{_GUEST}]}}" if root else ""
        (well.home / "stepwell.yaml").write_text(
            f"host: 128MiB\ndisk: {folder}/disk:256MiB\ndisk_reserve: 0.1%\nsocket: {well.main}\n"
            f"tenants:\n  a: {{socket: {well.a}}}\n  b: {{socket: {well.b}}}{third}\n"
        )
        command = [sys.executable, "-m", "stepwell", "serve", "--home", str(well.home)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        ending.callback(process.wait)
        ending.callback(process.kill)
        with suppress(TimeoutError):
            eventually(lambda: process.poll() is not None or control.pid_at(well.b) is not None, "the well listens")
        if control.pid_at(well.main) is None:
            raise RuntimeError(f"the well did not start: {(folder / 'log').read_text()[-2000:]}")
        if root:
            os.chown(well.main, -1, _GUEST)
        yield well


def _as_guest(path: Path, prefix: bytes) -> str:
    """What another user finds of it: "blocks by tenant"."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "no answer"
        try:
            os.setgroups([])
            os.setresgid(_GUEST, _GUEST, _GUEST)
            os.setresuid(_GUEST, _GUEST, _GUEST)
            with session(path) as guest:
                answer = f"{guest.found(prefix)[0]} by {control.stats(path.parent, socket=path)['tenant']}"
        except Exception as error:  # noqa: BLE001 - told by the parent
            answer = repr(error)
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def _stat(well: Well, name: str) -> int:
    return int(control.stats(well.home, socket=well.main).get(name, 0))
