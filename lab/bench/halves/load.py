"""Background load on a well: `python -m lab.bench.halves.load HOME ENGINES TOKENS EVERY_S`, until standard input ends.

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

from lab.rig.session import Session
from lab.rig.well import PATIENCE_S, POLL_S, eventually
from stepwell.block.digest import Chain
from stepwell.client.questions import Spill
from stepwell.client.scheduler import MAX_RESERVED
from stepwell.client.worker import WorkerClient

BLOCK_TOKENS = 128
SHARD_BYTES = 4096
NEW_BLOCKS = 16
"""Reserved and acknowledged after each ask: what 2,048 new tokens come to."""


class Members(Session):
    """Both members of one engine's session, which nothing may end: raises AssertionError then."""

    def __init__(
        self,
        home: Path,
        shard_bytes: int = SHARD_BYTES,
        *,
        worker: type[WorkerClient] = WorkerClient,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        super().__init__(home, shard_bytes, label="bench", block_tokens=block_tokens, worker=worker)
        self.join()

    def reserve(
        self, digests: bytes, parent: bytes = b"", *, patience_s: float = PATIENCE_S, poll_s: float = POLL_S
    ) -> Spill:
        spill = super().reserve(digests, parent, patience_s=patience_s, poll_s=poll_s)
        assert spill is not None, f"the session has ended: {self.troubles}"
        return spill

    def fill(self, digests: bytes) -> None:
        """Makes a chain of blocks resident, whatever their bytes are. Waits for room."""
        for at in range(0, len(digests), 32 * MAX_RESERVED):
            some, parent = digests[at : at + 32 * MAX_RESERVED], digests[max(0, at - 32) : at]
            eventually(functools.partial(self._filled, some, parent), "room for blocks", poll_s=POLL_S)

    def _filled(self, digests: bytes, parent: bytes) -> bool:
        self.acknowledge(self.reserve(digests, parent))
        found = self.scheduler.ask(digests, 0, 0)
        assert found is not None
        eventually(lambda: found.final, "an ask is answered", poll_s=POLL_S)
        self.scheduler.release(found)
        return found.blocks == len(digests) // 32


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
