"""An engine without a model whose bytes follow from the identity of their block, so that whoever recalls one knows what
it must be; it may be killed, or lose its well, at any moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from lab.rig.session import Session, write
from lab.rig.well import until
from stepwell.client.questions import Spill
from stepwell.io.memory import Bytes

_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Chain:
    """`blocks` consecutive blocks from the beginning of a prompt. The digests of a chain are the same in every model,
    and the bytes are not."""

    number: int
    blocks: int

    @property
    def digests(self) -> list[bytes]:
        return [blake3(f"{self.number}/{block}".encode()).digest() for block in range(self.blocks)]


def content(model: str, digest: bytes, nbytes: int) -> Bytes:
    return np.frombuffer(blake3(digest, derive_key_context=model).digest(length=nbytes), np.uint8)


@dataclass(slots=True)
class Recalled:
    """Blocks of a question: `right` and `wrong` ones were copied and compared, `staged` of the right ones came from a
    tier below; `changed` ones failed their check, as they may; the rest was not there."""

    right: int = 0
    wrong: int = 0
    staged: int = 0
    changed: int = 0


class Engine(Session):
    """One session with the well of `home`. `pause` is called in the middle of each copy."""

    def __init__(self, home: Path, model: str, shard_bytes: int, pause: Callable[[], None] = lambda: None) -> None:
        super().__init__(home, shard_bytes, model=blake3(model.encode()).digest(), label="trust")
        self.model = model
        self._pause = pause
        self._order = 0
        self._joined = False

    @property
    def lost(self) -> bool:
        """It had a session and has it no more."""
        return self._joined and not self.scheduler.live

    def joined(self, seconds: float) -> bool:
        """Waits until it may ask and has slots. False: not in that time, or the session is lost."""

        def there() -> bool:
            self._joined |= self.scheduler.live
            return self.lost or self.ready

        return until(there, seconds, _POLL_S) and not self.lost

    def recall(self, chain: Chain, seconds: float = 5.0) -> Recalled:
        """Asks, waits for what comes from below, copies and compares."""
        self._order += 1
        found, digests = Recalled(), chain.digests
        ask = self.scheduler.ask(b"".join(digests), 0, self._order)
        if ask is None:
            return found
        until(lambda: ask.final or self.lost, seconds, _POLL_S)
        blocks = self.scheduler.offer(ask)
        if not blocks:
            self.scheduler.release(ask)
            return found
        staged = ask.sources[:blocks]
        for copy, digest, from_below in zip(self.copies(ask, blocks, self._pause), digests, staged, strict=False):
            if copy is None:
                found.changed += 1
            elif np.array_equal(copy, content(self.model, digest, self.shard_bytes)):
                found.right += 1
                found.staged += bool(from_below)
            else:
                found.wrong += 1
        return found

    def lease(self, chain: Chain, seconds: float = 5.0) -> Spill | None:
        """None where the well does not answer in that time."""
        try:
            return self.reserve(b"".join(chain.digests), patience_s=seconds, poll_s=_POLL_S)
        except TimeoutError:
            return None

    def spill(self, chain: Chain) -> int:
        """Fills what it gets slots for; how many blocks that were."""
        spill, filled, digests = self.lease(chain), list[int](), chain.digests
        if spill is None:
            return 0
        with self.worker.copying() as hold:
            for lease, block, slot in self.slots(hold, spill):
                write(slot, content(self.model, digests[block], self.shard_bytes), self._pause)
                filled.append(lease)
                del slot
        self.acknowledge(spill, filled)
        return len(filled)
