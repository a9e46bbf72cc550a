"""An engine's side of the socket without an engine: spills blocks of its own making and recalls them. Light, and a
program of its own, so that its memory holds what any engine's client holds and can be looked at:
`python -m lab.trust.courier HOME HEARD`.

It is told on standard input, a line at a time: `spill FIRST COUNT`, `recall FIRST COUNT`; it answers each with the
number of blocks that were done. Content is made in the slot itself from a pattern that is stored masked: the only
place in this process where the real one can lie is the arena's mapping. All bytes that come from the well are kept in
the file HEARD.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from lab.bench.wells import until
from stepwell.client.scheduler import Identity as SchedulerIdentity
from stepwell.client.scheduler import SchedulerClient
from stepwell.client.socket import dial
from stepwell.client.start import find
from stepwell.client.worker import Hold, WorkerClient
from stepwell.client.worker import Identity as WorkerIdentity
from stepwell.errors import StepwellError
from stepwell.io.memory import Bytes
from stepwell.protocol import wire
from stepwell.protocol.link import Dial
from stepwell.protocol.messages import FromWell

SHARD = 1 << 20
_MASK = np.uint8(0xA5)
WEIGHTS, MODEL, LAYOUT = b"w" * 32, b"m" * 32, b"l" * 32
BLOCK_TOKENS = 16


def digest(n: int) -> bytes:
    """What names block `n` on the socket."""
    return blake3(b"courier's block" + n.to_bytes(8, "big")).digest()


def masked(n: int) -> Bytes:
    return np.frombuffer(blake3(b"courier's content" + n.to_bytes(8, "big")).digest(), np.uint8)


def marker(n: int) -> bytes:
    """The 32 bytes that block `n` repeats all over."""
    return (masked(n) ^ _MASK).tobytes()


class Courier:
    """One engine with one rank. Raises TimeoutError where the well does not answer."""

    def __init__(self, home: Path, label: str = "courier", *, at: Path | None = None) -> None:
        """`at`: the socket, where it is known."""
        name, self.troubles = secrets.token_hex(8), list[str]()

        def reach() -> Dial:
            return dial(at or find(home))

        def trouble(error: StepwellError) -> None:
            self.troubles.append(str(error))

        self._worker = WorkerClient(WorkerIdentity(name, 0, 1, SHARD, LAYOUT), reach, trouble=trouble)
        self._scheduler = SchedulerClient(
            SchedulerIdentity(name, 1, SHARD, BLOCK_TOKENS, LAYOUT, MODEL, label),
            lambda: WEIGHTS,
            reach,
            trouble=trouble,
        )
        until(lambda: self._scheduler.live and self._worker.mapped > 0, "no session, or no slab")

    def spill(self, blocks: Sequence[int]) -> int:
        """How many were taken: a block that is there already is not."""
        parent = digest(blocks[0] - 1) if blocks[0] else b""
        spill = self._scheduler.reserve(parent, b"".join(map(digest, blocks)), 0)
        if spill is None:
            return 0
        until(lambda: spill.granted, "a reservation is not answered")
        assert spill.refs is not None
        taken = [n for n, lease in zip(blocks, spill.leases, strict=True) if lease]
        with self._worker.copying() as hold:
            for n, (ref,) in zip(taken, spill.refs, strict=True):
                slot = self._slot(hold, spill.session, ref)
                for at in range(0, SHARD, 32):
                    slot[at : at + 32] = masked(n)
                np.bitwise_xor(slot, _MASK, out=slot)
        self._worker.filled(spill.session, [lease for lease in spill.leases if lease], [])
        return len(taken)

    def recall(self, blocks: Sequence[int]) -> int:
        """How many came, from whatever tier. Raises ValueError if one is not what was spilled."""
        ask = self._scheduler.ask(b"".join(map(digest, blocks)), 0, 0)
        if ask is None:
            return 0
        until(lambda: ask.final, "a question is not answered")
        if not self._scheduler.offer(ask):
            self._scheduler.release(ask)
            return 0
        transfer, refs = self._scheduler.recall(ask, 0, ask.blocks)
        with self._worker.copying() as hold:
            for n, (ref,) in zip(blocks, refs, strict=False):
                slot = self._slot(hold, ask.session, ref)
                for at, byte in enumerate(masked(n)):  # byte by byte, so that no copy is made to compare with
                    if (slot[at::32] != byte ^ _MASK).any():
                        raise ValueError(f"block {n} is not what was spilled")
        self._worker.recalled(ask.session, [transfer])
        return len(refs)

    @staticmethod
    def _slot(hold: Hold, session: int, ref: np.void) -> Bytes:
        return hold.slot(session, int(ref["slab"]), int(ref["slot"]), int(ref["generation"])).bytes

    def close(self) -> None:
        self._scheduler.close()
        self._worker.close()


def keep_what_comes(path: Path) -> None:
    """All bytes of messages from the well, of this whole process, go to the file too."""
    file, feed = path.open("wb", buffering=0), wire.Reader.feed

    def heard(reader: wire.Reader[FromWell], data: bytes) -> Iterator[FromWell]:
        file.write(data)
        return feed(reader, data)

    wire.Reader.feed = heard  # type: ignore[method-assign,assignment]


def main() -> None:
    keep_what_comes(Path(sys.argv[2]))
    courier = Courier(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        what, first, count = line.split()
        blocks = range(int(first), int(first) + int(count))
        print(courier.spill(blocks) if what == "spill" else courier.recall(blocks), flush=True)
    courier.close()


if __name__ == "__main__":
    main()
