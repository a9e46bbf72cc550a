"""An engine without a model: both clients over the real socket and the real shared memory, and bytes that follow from
the identity of their block, so that whoever recalls one knows what it must be.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from lab.rig.well import until
from stepwell.client import scheduler, worker
from stepwell.client.socket import dial
from stepwell.client.start import find
from stepwell.errors import StepwellError
from stepwell.io.memory import Bytes
from stepwell.protocol.link import Dial

_POLL_S = 0.0005
_LAYOUT, _WEIGHTS = b"l" * 32, b"w" * 32


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


class Engine:
    """One session with the well of `home`. One thread may use it. `pause` is called in the middle of each copy."""

    def __init__(self, home: Path, model: str, shard_bytes: int, pause: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.shard_bytes = shard_bytes
        self.troubles: list[StepwellError] = []
        self._pause = pause
        self._order = 0
        self._joined = False
        name, hash = secrets.token_hex(8), blake3(model.encode()).digest()

        def reach() -> Dial:
            return dial(find(home))

        self.worker = worker.WorkerClient(
            worker.Identity(name, 0, 1, shard_bytes, _LAYOUT), reach, trouble=self.troubles.append
        )
        self.scheduler = scheduler.SchedulerClient(
            scheduler.Identity(name, 1, shard_bytes, 16, _LAYOUT, hash, "trust"),
            lambda: _WEIGHTS,
            reach,
            trouble=self.troubles.append,
        )

    @property
    def lost(self) -> bool:
        """It had a session and has it no more."""
        return self._joined and not self.scheduler.live

    def join(self, seconds: float) -> bool:
        """Waits until it may ask and has slots. False: not in that time, or the session is lost."""

        def there() -> bool:
            self._joined |= self.scheduler.live
            return self.lost or (self.scheduler.live and self.worker.mapped > 0)

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
        transfer, refs = self.scheduler.recall(ask, 0, blocks)
        with self.worker.copying() as hold:
            for (ref,), digest, staged in zip(refs, digests[:blocks], ask.staged[:blocks], strict=True):
                at = (ask.session, int(ref["slab"]), int(ref["slot"]), int(ref["generation"]))
                try:
                    slot = hold.slot(*at).bytes
                    half = len(slot) // 2
                    copy = np.empty_like(slot)
                    copy[:half] = slot[:half]
                    self._pause()
                    copy[half:] = slot[half:]
                    self.worker.verify(*at)
                except StepwellError:
                    found.changed += 1
                    continue
                if np.array_equal(copy, content(self.model, digest, self.shard_bytes)):
                    found.right += 1
                    found.staged += bool(staged)
                else:
                    found.wrong += 1
        self.worker.recalled(ask.session, [transfer])
        return found

    def lease(self, chain: Chain, hold: worker.Hold, seconds: float = 5.0) -> list[tuple[int, bytes, Bytes]]:
        """Slots to fill: their leases, digests, and shared memory, for as long as `hold` is open."""
        digests = chain.digests
        spill = self.scheduler.reserve(b"", b"".join(digests), 0)
        if spill is None or not until(lambda: spill.granted, seconds, _POLL_S) or spill.refs is None:
            return []
        granted = [(lease, digest) for lease, digest in zip(spill.leases, digests, strict=True) if lease]
        slots = []
        for (lease, digest), (ref,) in zip(granted, spill.refs, strict=False):
            try:
                slot = hold.slot(spill.session, int(ref["slab"]), int(ref["slot"]), int(ref["generation"]))
            except StepwellError:
                break
            slots.append((lease, digest, slot.bytes))
        return slots

    def spill(self, chain: Chain) -> int:
        """Fills what it gets slots for; how many blocks that were."""
        session = self.scheduler.session
        with self.worker.copying() as hold:
            slots = self.lease(chain, hold)
            for _, digest, slot in slots:
                data, half = content(self.model, digest, self.shard_bytes), self.shard_bytes // 2
                slot[:half] = data[:half]
                self._pause()
                slot[half:] = data[half:]
        self.worker.filled(session, [lease for lease, _, _ in slots], [])
        return len(slots)

    def leave(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
