"""Byte streams into the socket of a real well: each ends its own connection, with one message at most, while an engine
beside them finds its blocks, bit for bit."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from lab.bench.wells import well
from lab.trust.format.pieces import Tally, Turn
from lab.trust.format.wire.talk import kinds, message, stream
from stepwell.block.layout import MiB
from stepwell.client import control
from stepwell.client.start import rendezvous
from stepwell.errors import ProtocolError, StepwellError
from stepwell.io.memory import Mapping
from stepwell.log import LOG_NAME
from stepwell.protocol import messages as m
from stepwell.protocol import wire

HOST, SHARD = 64 * MiB, 65_536
_BLOCKS = 16
_PATIENCE_S = 10.0
_GROWTH = HOST + 160 * MiB
"""What the well may take in addition: its arena, and for one connection 16 MiB in and 64 MiB out."""

_CHECKED_EVERY, _CHILD_EVERY = 20, 50
_SAID = tuple(kind for kind in kinds(m.FromEngine) if kind is not m.Stop)  # which would end the well, rightly


class _Peer:
    """One connection, as raw as it can be."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_PATIENCE_S)
        self.sock.connect(str(path))
        self.fds: list[int] = []
        self._reader = wire.Reader(wire.from_well)
        self._got: list[m.FromWell] = []

    def send(self, *messages: m.Message, fds: tuple[int, ...] = ()) -> None:
        data = b"".join(wire.frame(each) for each in messages)
        sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
        self.sock.sendall(data[sent:])

    def read(self) -> m.FromWell | None:
        """The next message; None at the end. Raises TimeoutError, and ProtocolError where the well talks nonsense."""
        while not self._got:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 8)
            except ConnectionResetError:
                return None
            self.fds += fds
            if not data:
                return None
            self._got += self._reader.feed(data)
        return self._got.pop(0)

    def until(self, kind: type[m.Message]) -> Any:
        while not isinstance(said := self.read(), kind):
            if said is None or isinstance(said, m.Refused):
                raise ProtocolError("SW-804", what=f"{said} instead of {kind.__name__}", why="", fix="")
        return said

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def _hello(role: str, engine: str) -> m.Hello:
    return m.Hello(m.PROTOCOL, role, engine, 0, 1, SHARD, b"l" * 32, b"w" * 32, b"m" * 32, 16)


class _Engine:
    """A session with a few blocks of known bytes in the well."""

    def __init__(self, path: Path) -> None:
        self._scheduler, self._worker = _Peer(path), _Peer(path)
        pidfd = os.pidfd_open(os.getpid())
        self._worker.send(_hello("worker", "healthy"), fds=(pidfd,))
        os.close(pidfd)
        self._scheduler.send(_hello("scheduler", "healthy"))
        self._scheduler.until(m.Ready)
        shared = self._worker.until(m.SlabShared)
        self._slab, self._mapping = shared, Mapping(self._worker.fds[0], shared.nbytes)
        self._worker.send(m.Mapped(shared.slab))
        self._digests = b"".join(blake3(b"healthy %d" % n).digest() for n in range(_BLOCKS))
        self._tickets = 0
        self.fill()

    def fill(self) -> None:
        """Spills what the well does not have."""
        self._scheduler.send(m.Reserve(1, 0, b"", self._digests))
        granted = self._scheduler.until(m.Granted)
        refs = iter(np.frombuffer(granted.slots, m.SLOT_REF))
        for n, lease in enumerate(granted.leases):
            if lease:
                self._slot(int(next(refs)["slot"]))[:] = _content(n)
        self._worker.send(m.Filled([lease for lease in granted.leases if lease], []))

    def wrong(self) -> tuple[int, int]:
        """Blocks that it can recall, and how many of them have other bytes."""
        self._tickets += 1
        self._scheduler.send(m.Ask(self._tickets, 0, self._tickets, self._digests))
        found = wrong = 0
        more = True
        while more:
            said = self._scheduler.until(m.Found)
            for ref in np.frombuffer(said.slots, m.SLOT_REF):
                got = self._slot(int(ref["slot"])).tobytes()
                words = self._mapping.bytes[: 8 * self._slab.slots].view(np.uint64)
                wrong += got != _content(found).tobytes() and int(words[int(ref["slot"])]) == int(ref["generation"])
                found += 1
            more = said.more
        self._scheduler.send(m.Release(self._tickets))
        return found, wrong

    def _slot(self, slot: int) -> Any:
        start = self._slab.offset + slot * self._slab.stride
        return self._mapping.bytes[start : start + SHARD]

    def close(self) -> None:
        self._mapping.close()
        self._scheduler.close()
        self._worker.close()


def _content(block: int) -> Any:
    return np.frombuffer(random.Random(f"healthy {block}").randbytes(SHARD), np.uint8)


def into_a_well(turn: Turn, number: int, times: int) -> Tally:
    tally = Tally()
    with well(HOST) as home:
        pid = control.pid(home)
        assert pid is not None
        with closing(_Engine(rendezvous(home).socket)) as engine:
            before, files = _memory(pid), _descriptors(pid)
            try:
                _all(turn, times, tally, home, engine)
            except OSError as error:
                tally.wrong(f"{turn.name}: after {tally.cases} cases the well cannot be reached: {error}{_last(home)}")
                return tally
            tally.cases += 2
            grown = _memory(pid) - before
            tally.notes.append(f"the well grew by {max(0, grown) / MiB:.0f} MiB")
            if grown > _GROWTH:
                tally.wrong(f"{turn.name}: the well grew by {grown / MiB:.0f} MiB")
            _settled(tally, home, pid, files, turn.name)
        if said := _last(home):
            tally.wrong(f"{turn.name}: the well's log has a traceback{said}")
    return tally


def _all(turn: Turn, times: int, tally: Tally, home: Path, engine: _Engine) -> None:
    """Raises OSError when the well is no longer there."""
    dice, path = turn.dice(), rendezvous(home).socket
    for first in range(0, times, _CHILD_EVERY):
        with _child() as child:
            for case in range(first, min(first + _CHILD_EVERY, times)):
                _one(dice, tally, path, child, f"{turn.name}: case {case}")
                if case % _CHECKED_EVERY == 0:
                    _beside(tally, home, engine, f"{turn.name}: after case {case}")
        if turn.over:
            break


def _last(home: Path) -> str:
    """The end of the last traceback in the well's log, if there is one."""
    time.sleep(0.5)  # it may be writing it
    _, found, rest = (home / LOG_NAME).read_text().rpartition("Traceback")
    return f": {rest[-300:]}" if found else ""


def _one(dice: random.Random, tally: Tally, path: Path, child: int, what: str) -> None:
    """A connection that begins well, or not at all, and goes on badly."""
    tally.cases += 1
    engine = f"odd {dice.randrange(1 << 40)}"
    with closing(_Peer(path)) as peer, closing(_Peer(path)) as other:
        roles = [("", ""), ("admin", ""), ("scheduler", ""), ("scheduler", "worker"), ("worker", "scheduler")]
        role, others = dice.choice(roles)
        try:
            if others:
                other.send(_hello(others, engine), fds=(child,))
            if role:
                peer.send(_hello(role, engine), fds=(child,))
            if dice.random() < 0.5:
                peer.send(*[message(dice, dice.choice(_SAID)) for _ in range(dice.randint(1, 8))])
            peer.sock.sendall(_bytes(dice))
            peer.sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was dropped already: what it was told is read below
        except TimeoutError:
            tally.wrong(f"{what}: the well reads no more")
            return
        _heard(tally, peer, what)


def _bytes(dice: random.Random) -> bytes:
    kind = dice.random()
    if kind < 0.05:
        return (m.MAX_MESSAGE - dice.randrange(9)).to_bytes(4, "little") + dice.randbytes(1024) * (1 << 14)
    if kind < 0.15:
        return dice.randbytes(dice.randrange(1 << 12))
    while b"\xa4Stop" in (made := stream(dice, m.FromEngine)):
        pass
    return made


def _heard(tally: Tally, peer: _Peer, what: str) -> None:
    """The stream's end, and before it one refusal at most, the last thing that is said."""
    refused = 0
    try:
        while (said := peer.read()) is not None:
            if refused:
                tally.wrong(f"{what}: {type(said).__name__} after a refusal")
            refused += isinstance(said, m.Refused)
    except TimeoutError:
        tally.wrong(f"{what}: the connection does not end")
    except ProtocolError as error:
        tally.wrong(f"{what}: the well said what is no message: {error}")


def _beside(tally: Tally, home: Path, engine: _Engine, what: str) -> None:
    """Others are served as ever."""
    tally.cases += 1
    try:
        control.ping(home, seconds=_PATIENCE_S)
        control.stats(home, seconds=_PATIENCE_S)
        found, wrong = engine.wrong()
        tally.right += found
        if wrong:
            tally.wrong(f"{what}: {wrong} blocks have other bytes")
        engine.fill()
    except (StepwellError, OSError) as error:
        tally.wrong(f"{what}: {type(error).__name__}: {error}")


def _settled(tally: Tally, home: Path, pid: int, files: int, name: str) -> None:
    """Nothing is left of those that have gone: connections, sessions, leases, descriptors."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        stats = control.stats(home, seconds=_PATIENCE_S)
        left = {key: stats[key] for key in ("sessions", "quarantined_sessions", "quarantined_slots", "leased_blocks")}
        more = _descriptors(pid) - files
        if (left, more) == ({**dict.fromkeys(left, 0), "sessions": 1}, 0):
            return
        if time.monotonic() > deadline:
            tally.wrong(f"{name}: left over are {left} and {more} descriptors")
            return
        time.sleep(0.05)


@contextmanager
def _child() -> Iterator[int]:
    """The pidfd of a process that ends with this: so does what it might still be copying, for the well."""
    process = subprocess.Popen(["sleep", "600"])
    pidfd = os.pidfd_open(process.pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
        process.kill()
        process.wait()


def _memory(pid: int) -> int:
    """The most that it had in memory, in bytes, its arena included."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


def _descriptors(pid: int) -> int:
    """Without the arena's, whose bound is `host`."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            count += "memfd:" not in os.readlink(f"/proc/{pid}/fd/{name}")
    return count
