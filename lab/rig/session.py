"""One engine's session with a real well, without an engine: a scheduler and a worker that share this process.

Both are stepwell's own clients over the well's socket, with shared memory. What a program does with them is its own:
`caller` recalls and compares, `kills` is killed in the middle of it, `pressure` never looks at a byte.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from lab.rig.well import PATIENCE_S, POLL_S, eventually, until
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.questions import PrefixQuestion, Spill
from stepwell.client.scheduler import SchedulerClient
from stepwell.client.socket import dial
from stepwell.client.start import find
from stepwell.client.worker import Hold, WorkerClient
from stepwell.errors import IntegrityError, StepwellError
from stepwell.io.memory import Bytes
from stepwell.protocol.link import Dial

LAYOUT, WEIGHTS, MODEL = b"l" * 32, b"w" * 32, b"m" * 32
BLOCK_TOKENS = 16


class Session:
    """Joins the well of `home`. One thread may use it. `troubles`: what the clients reported."""

    def __init__(
        self,
        home: Path,
        shard_bytes: int,
        *,
        model: bytes = MODEL,
        label: str = "rig",
        block_tokens: int = BLOCK_TOKENS,
        socket: Path | None = None,
        worker: type[WorkerClient] = WorkerClient,
    ) -> None:
        """`model`: 32 bytes; those of the same model share blocks. `socket`: the well's, where it is known."""
        engine = secrets.token_hex(8)
        self.shard_bytes = shard_bytes
        self.troubles: list[StepwellError] = []

        def reach() -> Dial:
            return dial(socket or find(home))

        trouble = self.troubles.append
        self.worker = worker(WorkerIdentity(engine, 0, 1, shard_bytes, LAYOUT), reach, trouble=trouble)
        self.scheduler = SchedulerClient(
            EngineIdentity(engine, 1, shard_bytes, block_tokens, LAYOUT, model, label),
            lambda: WEIGHTS,
            reach,
            trouble=trouble,
        )

    @property
    def ready(self) -> bool:
        """There is a session, and room in a slab."""
        return self.scheduler.live and self.worker.mapped > 0

    def join(self, patience_s: float = PATIENCE_S) -> None:
        """Waits until it is ready. Raises TimeoutError."""
        if not until(lambda: self.ready, patience_s):
            raise TimeoutError(f"no session, or no slab, within {patience_s:g} s: {self.troubles}")

    def reserve(
        self, digests: bytes, parent: bytes = b"", *, patience_s: float = PATIENCE_S, poll_s: float = POLL_S
    ) -> Spill | None:
        """Leases for at most MAX_RESERVED blocks, when the well has answered; None without a session. Raises
        TimeoutError."""
        spill = self.scheduler.reserve(parent, digests, 0)
        if spill is not None:
            eventually(lambda: spill.granted, "a reservation is answered", patience_s, poll_s)
        return spill

    def slots(self, hold: Hold, spill: Spill) -> list[tuple[int, int, Bytes]]:
        """Of a granted reservation: leases, which of its blocks each is for, and the memory to fill while `hold` is
        open. Ends at the first that is no longer the session's."""
        found: list[tuple[int, int, Bytes]] = []
        leases = [(lease, at) for at, lease in enumerate(spill.leases) if lease]
        for (lease, at), row in zip(leases, spill.refs if spill.refs is not None else (), strict=False):
            try:
                found.append((lease, at, slot(hold, spill.session, row[0])))
            except IntegrityError:
                break
        return found

    def acknowledge(self, spill: Spill, filled: Sequence[int] | None = None) -> None:
        """Of the leases, these are `filled`: all of them, unless it says which. The others are given back."""
        leases = [lease for lease in spill.leases if lease]
        done = leases if filled is None else list(filled)
        self.worker.filled(spill.session, done, [lease for lease in leases if lease not in set(done)])

    def copies(self, ask: PrefixQuestion, blocks: int, pause: Callable[[], None] = lambda: None) -> list[Bytes | None]:
        """Recalls the first `blocks` of what was offered; None for one whose lease has ended during the copy. `pause`
        is called in the middle of each."""
        transfer, refs = self.scheduler.recall(ask, 0, blocks)
        with self.worker.copying() as hold:
            copies = [self._copy(hold, ask.session, row[0], pause) for row in refs]
        self.worker.recalled(ask.session, [transfer])
        return copies

    def _copy(self, hold: Hold, session: int, ref: np.void, pause: Callable[[], None]) -> Bytes | None:
        try:
            shared = slot(hold, session, ref)
            copy = np.empty_like(shared)
            write(copy, shared, pause)
            self.worker.verify(session, *ref.item())
        except IntegrityError:
            return None
        return copy

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slot(hold: Hold, session: int, ref: np.void) -> Bytes:
    """The shared memory that a reference names, while `hold` is open. Raises IntegrityError where it is no longer the
    session's."""
    return hold.slot(session, *ref.item()).bytes


def write(into: Bytes, data: Bytes, pause: Callable[[], None] = lambda: None) -> None:
    """In two halves, with the pause between them."""
    half = len(into) // 2
    into[:half] = data[:half]
    pause()
    into[half:] = data[half:]
