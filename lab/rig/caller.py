"""A session whose requests know what they must get: what is recalled, and whether its bytes are right.

A block's bytes are a function of its digest, so whoever recalls a block knows what it must be, after any restart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from blake3 import blake3

from lab.rig.session import BLOCK_TOKENS, MODEL, Session
from lab.rig.well import PATIENCE_S, POLL_S
from stepwell.block.digest import Chain
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import MAX_RESERVED
from stepwell.io.memory import Bytes

_VOCABULARY = 1 << 20


def prefix(dice: random.Random, blocks: int) -> bytes:
    """Digests of a prompt of random tokens."""
    chain = Chain(BLOCK_TOKENS)
    chain.extend([dice.randrange(_VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)])
    return chain.digests


def content(digest: bytes, nbytes: int) -> Bytes:
    """What the block of this digest has to be."""
    return np.frombuffer(blake3(digest).digest(length=nbytes), np.uint8)


@dataclass(frozen=True, slots=True)
class Recalled:
    """`blocks` of `asked` were offered; those whose bytes were compared and are not what was spilled are `wrong`, by
    their place. `lost`: their lease ended during the copy, so an engine computes them. `wait_s`: from the first ask
    until waiting ended. `staged`: of `blocks`, those that came up from a tier for this."""

    asked: int
    blocks: int = 0
    staged: int = 0
    lost: int = 0
    wrong: list[int] = field(default_factory=list)
    wait_s: float = 0.0
    reason: str = ""

    @property
    def compared(self) -> int:
        return self.blocks - self.lost


class Caller(Session):
    """Raises TimeoutError where a well that serves does not answer, and whatever the clients raise: there is no fault
    of a disk that may lead to either."""

    def __init__(self, home: Path, shard_bytes: int, model: bytes = MODEL) -> None:
        super().__init__(home, shard_bytes, model=model, label="caller")
        self._order = 0

    def __enter__(self) -> Self:
        self.join()
        return self

    def spill(self, digests: bytes) -> int:
        """Spills what the well takes of these blocks; how many. 0 without a session."""
        taken = 0
        for at in range(0, len(digests), 32 * MAX_RESERVED):
            some, parent = digests[at : at + 32 * MAX_RESERVED], digests[max(0, at - 32) : at]
            spill = self.reserve(some, parent)
            if spill is None:
                break
            filled: list[int] = []
            with self.worker.copying() as hold:
                for lease, block, slot in self.slots(hold, spill):
                    slot[:] = content(some[32 * block : 32 * block + 32], self.shard_bytes)
                    filled.append(lease)
                    del slot  # views of slots: none may outlive `copying`
            self.acknowledge(spill, filled)
            taken += len(filled)
        return taken

    def recall(self, digests: bytes) -> Recalled:
        """What one request gets of its prefix, and whether it is right."""
        return self.recall_many([digests])[0]

    def recall_many(self, prefixes: Sequence[bytes]) -> list[Recalled]:
        """The same for requests that wait at the same time, in this order."""
        began = time.monotonic()
        answers: dict[int, Recalled] = {}
        waiting: dict[int, PrefixQuestion] = {}
        for at, digests in enumerate(prefixes):
            self._order += 1
            ask = self.scheduler.ask(digests, 0, self._order)
            if ask is None:
                answers[at] = Recalled(len(digests) // 32, reason="no session")
            else:
                waiting[at] = ask
        while waiting:
            for at, ask in list(waiting.items()):
                if self.scheduler.settle(ask, 0.001):
                    answers[at] = self._take(prefixes[at], waiting.pop(at), time.monotonic() - began)
            if waiting:
                time.sleep(POLL_S)
            if time.monotonic() - began > PATIENCE_S:
                for ask in waiting.values():
                    self.scheduler.release(ask)
                raise TimeoutError(f"{len(waiting)} requests still wait after {PATIENCE_S:g} s")
        return [answers[at] for at in range(len(prefixes))]

    def _take(self, digests: bytes, ask: PrefixQuestion, wait_s: float) -> Recalled:
        asked, blocks = len(digests) // 32, self.scheduler.offer(ask)
        staged, reason = sum(map(bool, ask.sources[:blocks])), ask.reason
        if not blocks:
            self.scheduler.release(ask)
            return Recalled(asked, wait_s=wait_s, reason=reason)
        copies = self.copies(ask, blocks)
        wrong = [
            at
            for at, copy in enumerate(copies)
            if copy is not None and not np.array_equal(copy, content(digests[32 * at : 32 * at + 32], self.shard_bytes))
        ]
        return Recalled(asked, blocks, staged, sum(copy is None for copy in copies), wrong, wait_s, reason)

    def recall_rest(self, digests: bytes) -> Recalled:
        """Everything of it that is there, beyond the first block that is not as well."""
        blocks = staged = lost = at = 0
        wrong: list[int] = []
        wait_s = 0.0
        asked, reason = len(digests) // 32, ""
        while at < asked:
            got = self.recall(digests[32 * at :])
            blocks, staged, lost = blocks + got.blocks, staged + got.staged, lost + got.lost
            wrong += [at + place for place in got.wrong]
            wait_s, reason = max(wait_s, got.wait_s), got.reason
            at += got.blocks + 1
        return Recalled(asked, blocks, staged, lost, wrong, wait_s, reason)

    def recall_all(self, digests: bytes, patience_s: float = PATIENCE_S) -> Recalled:
        """Asks again until all of it comes. Raises TimeoutError if it never does."""
        deadline = time.monotonic() + patience_s
        while (got := self.recall(digests)).compared < got.asked:
            if got.wrong:
                return got
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {patience_s:g} s: {got.asked} blocks are recalled, but {got}")
            time.sleep(0.05)
        return got
