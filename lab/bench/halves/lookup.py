"""Looking up a long prompt, and the round trip to the well, alone and while others ask.

A lookup is all that lies between a request's arrival and the last `Found` at the client: hashing its tokens, the ask,
the socket, the index, pins, the answer's thread. A round trip is a Ping through the loop that serves the engines. Under
load it is compared with a bare echo process on the same machine at the same moments: one ping here, one there, in turn.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.bench import wells
from lab.bench.report import Result, Row, Target
from stepwell.client.socket import connect, send_hello
from stepwell.client.start import rendezvous
from stepwell.demo.results import stats
from stepwell.protocol import wire
from stepwell.protocol.messages import PROTOCOL, Hello, Ping, Pong, Welcome

TOKENS = 128 << 10
LOAD_ENGINES, LOAD_TOKENS = 8, 32 << 10
_HOST = 1 << 30
_PING_PAUSE_S = 0.0005
_SEED = 3


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `load_every_s`: seconds between the asks of each background engine."""

    lookups: int
    pings: int
    tokens: int = TOKENS
    engines: int = LOAD_ENGINES
    load_every_s: float = 0.1


FULL, QUICK = Size(60, 5000), Size(3, 100, 16 << 10, 2)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    with wells.well(_HOST) as home, _echo(home.parent / "echo.sock") as echo:
        looked = {block_tokens: _lookups(home, size, block_tokens) for block_tokens in (128, 16)}
        well = _Pinger.to_well(home)
        idle_well, idle_echo = _in_turn(well, echo, size.pings)
        with _load(home, size) as under_way:
            busy_well, busy_echo = _in_turn(well, echo, size.pings)
        well.close()
    thousands = f"{size.tokens >> 10}K tokens"
    rows = [
        Row(
            f"lookup of {thousands}, 128-token blocks",
            "ms",
            stats.median(looked[128]).times(1e3),
            Target("<", 10.0),
        ),
        Row("  the slowest twentieth of them begins at", "ms", stats.percentile(looked[128], 95).times(1e3)),
        Row(f"lookup of {thousands}, 16-token blocks", "ms", stats.median(looked[16]).times(1e3)),
        Row("round trip p50, idle", "us", stats.median(idle_well).times(1e6), Target("<", 100.0)),
        Row("  a bare echo's", "us", stats.median(idle_echo).times(1e6)),
        Row("round trip p99 under load, well", "us", stats.percentile(busy_well, 99).times(1e6)),
        Row("round trip p99 under load, bare echo", "us", stats.percentile(busy_echo, 99).times(1e6)),
        Row(
            "  the well's over the echo's",
            "",
            stats.ratio_of_percentiles(busy_well, busy_echo, 99),
            Target("<=", 1.5),
        ),
        Row("round trip p50 under load, well", "us", stats.median(busy_well).times(1e6)),
        Row("round trip p50 under load, bare echo", "us", stats.median(busy_echo).times(1e6)),
    ]
    counts = {"lookups": size.lookups, "pings": size.pings, "asks_as_load": under_way.asks}
    return Result("lookup", rows, counts, [under_way.remark(size)])


def _lookups(home: Path, size: Size, block_tokens: int) -> list[float]:
    """Seconds of lookups of one resident prompt: all of it is found, pinned and told each time."""
    from lab.bench.halves.standin import Kv, StandIn, prompts

    prompt = next(prompts(size.tokens, _SEED))
    kv = Kv(page=block_tokens, block_tokens=block_tokens, pages=size.tokens // block_tokens + 8)
    seconds = []
    with StandIn(home, kv, pause_s=0.02, model=bytes([block_tokens]) * 32) as engine:
        engine.wait_ready()
        while engine.serve(prompt) < size.tokens:  # a finished request's last spills are given up after a while
            pass
        for _ in range(size.lookups):
            request = engine.request(prompt)
            began = time.perf_counter()
            engine.scheduler.on_new_request(request)
            ask = engine.client.last
            assert ask is not None
            engine.client.settle(ask, 10.0)
            seconds.append(time.perf_counter() - began)
            if not ask.final or ask.blocks != size.tokens // block_tokens:
                raise RuntimeError(f"{ask.blocks} of {size.tokens // block_tokens} blocks found: {ask.reason}")
            engine.scheduler.finished(request)
            time.sleep(0.01)
    return seconds


class _Pinger:
    """A blocking connection whose round trips are timed: `frame` goes out, as many bytes as `answer` come back."""

    def __init__(self, sock: socket.socket, frame: bytes, answer: int) -> None:
        self._sock, self._frame, self._answer = sock, frame, answer

    @classmethod
    def to_well(cls, home: Path) -> _Pinger:
        sock = connect(rendezvous(home).socket, 10.0)
        send_hello(sock, Hello(PROTOCOL, "admin"))
        reader = wire.Reader(wire.from_well)
        while not any(isinstance(message, Welcome) for message in list(reader.feed(sock.recv(1 << 16)))):
            pass
        sock.settimeout(None)
        return cls(sock, wire.frame(Ping(1)), len(wire.frame(Pong(1))))

    def __call__(self) -> float:
        began = time.perf_counter()
        self._sock.sendall(self._frame)
        left = self._answer
        while left > 0:
            got = len(self._sock.recv(left))
            if not got:
                raise ConnectionError("the other end has closed the connection")
            left -= got
        return time.perf_counter() - began

    def close(self) -> None:
        self._sock.close()


def _in_turn(one: Callable[[], float], other: Callable[[], float], count: int) -> tuple[list[float], list[float]]:
    """`count` times each, alternating also in who goes first, with pauses as between an engine's messages."""
    ones: list[float] = []
    others: list[float] = []
    for number in range(count):
        for call, seconds in [(one, ones), (other, others)][:: 1 if number % 2 else -1]:
            time.sleep(_PING_PAUSE_S)
            seconds.append(call())
    return ones, others


@contextlib.contextmanager
def _echo(path: Path) -> Iterator[_Pinger]:
    with _process("echo", str(path)):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        frame = wire.frame(Ping(1))
        pinger = _Pinger(sock, frame, len(frame))
        yield pinger
        pinger.close()


@dataclass(slots=True)
class _UnderWay:
    asks: int = 0
    incomplete: int = 0
    seconds: float = 0.0

    def remark(self, size: Size) -> str:
        rate = self.asks / self.seconds if self.seconds else 0.0
        return (
            f"load: {size.engines} engines, each asking for {LOAD_TOKENS >> 10}K tokens every {size.load_every_s:g} s "
            f"and then spilling 16 blocks: {rate:.0f} asks a second in all, {self.incomplete} not answered in full"
        )


@contextlib.contextmanager
def _load(home: Path, size: Size) -> Iterator[_UnderWay]:
    found = _UnderWay()
    with _process("load", str(home), str(size.engines), str(LOAD_TOKENS), str(size.load_every_s)) as process:
        yield found
        out, _ = process.communicate()
        last = json.loads(out.splitlines()[-1])
        found.asks, found.incomplete, found.seconds = last["asks"], last["incomplete"], last["seconds"]


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of this package's helpers, ready. It ends with its standard input."""
    command = [sys.executable, "-m", f"lab.bench.halves.{module}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{module} did not start")
            yield process
        finally:
            process.kill()
