"""An engine's side of the socket without an engine: spills blocks of its own making and recalls them. Light, and a
program of its own, so that its memory holds what any engine's client holds and can be looked at:
`python -m lab.trust.courier HOME HEARD`.

It is told on standard input, a line at a time: `spill FIRST COUNT`, `recall FIRST COUNT`; it answers each with the
number of blocks that were done. Content is made in the slot itself from a pattern that is stored masked: the only
place in this process where the real one can lie is the arena's mapping. All bytes that come from the well are kept in
the file HEARD.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from lab.rig.session import Session, slot
from lab.rig.well import eventually
from stepwell.io.memory import Bytes
from stepwell.protocol import wire
from stepwell.protocol.messages import FromWell

SHARD = 1 << 20
_MASK = np.uint8(0xA5)


def digest(n: int) -> bytes:
    """What names block `n` on the socket."""
    return blake3(b"courier's block" + n.to_bytes(8, "big")).digest()


def masked(n: int) -> Bytes:
    return np.frombuffer(blake3(b"courier's content" + n.to_bytes(8, "big")).digest(), np.uint8)


def marker(n: int) -> bytes:
    """The 32 bytes that block `n` repeats all over."""
    return (masked(n) ^ _MASK).tobytes()


class Courier(Session):
    """One engine with one rank. Raises TimeoutError where the well does not answer."""

    def __init__(self, home: Path, label: str = "courier", *, at: Path | None = None) -> None:
        """`at`: the socket, where it is known."""
        super().__init__(home, SHARD, label=label, socket=at)
        self.join()

    def spill(self, blocks: Sequence[int]) -> int:
        """How many were taken: a block that is there already is not."""
        spill = self.reserve(b"".join(map(digest, blocks)), digest(blocks[0] - 1) if blocks[0] else b"")
        if spill is None:
            return 0
        with self.worker.copying() as hold:
            slots = self.slots(hold, spill)
            for _, at, shared in slots:
                for first in range(0, SHARD, 32):
                    shared[first : first + 32] = masked(blocks[at])
                np.bitwise_xor(shared, _MASK, out=shared)
            filled = [lease for lease, _, _ in slots]
            del slots, shared
        self.acknowledge(spill, filled)
        return len(filled)

    def recall(self, blocks: Sequence[int]) -> int:
        """How many came, from whatever tier. Raises ValueError if one is not what was spilled."""
        ask = self.scheduler.ask(b"".join(map(digest, blocks)), 0, 0)
        if ask is None:
            return 0
        eventually(lambda: ask.final, "a question is answered")
        if not self.scheduler.offer(ask):
            self.scheduler.release(ask)
            return 0
        transfer, refs = self.scheduler.recall(ask, 0, ask.blocks)
        with self.worker.copying() as hold:
            for n, (ref,) in zip(blocks, refs, strict=False):
                shared = slot(hold, ask.session, ref)
                for at, byte in enumerate(masked(n)):  # byte by byte, so that no copy is made to compare with
                    if (shared[at::32] != byte ^ _MASK).any():
                        raise ValueError(f"block {n} is not what was spilled")
        self.worker.recalled(ask.session, [transfer])
        return len(refs)


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
