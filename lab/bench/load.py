"""Background load on a well: `python -m lab.bench.load HOME ENGINES TOKENS EVERY_S`, until standard input ends.

Each of ENGINES sessions asks, every EVERY_S seconds, for a prefix of TOKENS tokens that the well holds, takes the whole
answer, lets go of it, and then reserves a few new blocks and acknowledges them as written (nothing is copied: the well
never looks). Says "ready" when all of it has begun, and at the end how many asks it made as one JSON line. A process of
its own, so that its Python does not stand in the measurer's way.
"""

from __future__ import annotations

import functools
import json
import secrets
import sys
import threading
import time
from pathlib import Path

import numpy as np

from lab.bench.wells import until
from stepwell.block.digest import Chain
from stepwell.client.scheduler import MOST_RESERVED, SchedulerClient, Spill
from stepwell.client.scheduler import Identity as SchedulerIdentity
from stepwell.client.socket import dial
from stepwell.client.start import find
from stepwell.client.worker import Identity as WorkerIdentity
from stepwell.client.worker import WorkerClient

BLOCK_TOKENS = 128
SHARD_BYTES = 4096
NEW_BLOCKS = 16
"""Reserved and acknowledged after each ask: what 2,048 new tokens come to."""


class Members:
    """Both members of one engine's session, without an engine."""

    def __init__(
        self,
        home: Path,
        shard_bytes: int = SHARD_BYTES,
        *,
        worker: type[WorkerClient] = WorkerClient,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        engine, layout = secrets.token_hex(8), b"l" * 32
        self.worker = worker(
            WorkerIdentity(engine, 0, 1, shard_bytes, layout), lambda: dial(find(home)), trouble=_raise
        )
        self.scheduler = SchedulerClient(
            SchedulerIdentity(engine, 1, shard_bytes, block_tokens, layout, b"m" * 32, "bench"),
            lambda: b"w" * 32,
            lambda: dial(find(home)),
            trouble=_raise,
        )
        until(lambda: self.scheduler.live and self.worker.mapped > 0, "no session, or no slab")

    def reserve(self, digests: bytes, parent: bytes = b"", every_s: float = 0.002) -> Spill:
        """Leases slots for at most MOST_RESERVED blocks and waits for the answer, looking for it every so often."""
        spill = self.scheduler.reserve(parent, digests, 0)
        assert spill is not None, "the session has ended"
        until(lambda: spill.granted, "a reservation is not answered", every_s=every_s)
        return spill

    def acknowledge(self, spill: Spill) -> None:
        self.worker.filled(self.scheduler.session, [lease for lease in spill.leases if lease], [])

    def fill(self, digests: bytes) -> None:
        """Makes a chain of blocks resident, whatever their bytes are. Waits for room."""
        for at in range(0, len(digests), 32 * MOST_RESERVED):
            some, parent = digests[at : at + 32 * MOST_RESERVED], digests[max(0, at - 32) : at]
            until(functools.partial(self._filled, some, parent), "no room for blocks")

    def _filled(self, digests: bytes, parent: bytes) -> bool:
        spill = self.reserve(digests, parent)
        self.acknowledge(spill)
        found = self.scheduler.ask(digests, 0, 0)
        assert found is not None
        until(lambda: found.final, "an ask is not answered")
        self.scheduler.release(found)
        return found.blocks == len(digests) // 32

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def _raise(error: Exception) -> None:
    raise error


def chain(tokens: int, seed: int, block_tokens: int = BLOCK_TOKENS) -> bytes:
    """Digests of a prompt of random tokens."""
    digests = Chain(block_tokens)
    digests.extend(np.random.default_rng(seed).integers(0, 32_000, tokens).tolist())
    return digests.digests


class _Asker(threading.Thread):
    def __init__(self, home: Path, number: int, tokens: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.asks = 0
        self.incomplete = 0
        self.ending = threading.Event()
        self._members = Members(home)
        self._digests = chain(tokens, number)
        self._every_s = every_s
        self._members.fill(self._digests)

    def run(self) -> None:
        at = time.monotonic() + secrets.randbelow(1000) / 1000 * self._every_s
        while not self.ending.wait(max(0.0, at - time.monotonic())):
            at += self._every_s
            ask = self._members.scheduler.ask(self._digests, 0, self.asks)
            if ask is None:
                return
            self._members.scheduler.settle(ask, 10.0)
            self.asks += 1
            self.incomplete += ask.blocks < len(self._digests) // 32
            self._members.scheduler.release(ask)
            self._members.acknowledge(self._members.reserve(secrets.token_bytes(32 * NEW_BLOCKS)))


def main() -> None:
    home, engines, tokens, every_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    askers = [_Asker(home, number, tokens, every_s) for number in range(engines)]
    for asker in askers:
        asker.start()
    began = time.monotonic()
    print("ready", flush=True)
    sys.stdin.read()
    asks, incomplete, seconds = sum(a.asks for a in askers), sum(a.incomplete for a in askers), time.monotonic() - began
    for asker in askers:
        asker.ending.set()
    print(json.dumps({"asks": asks, "incomplete": incomplete, "seconds": round(seconds, 3)}), flush=True)


if __name__ == "__main__":
    main()
