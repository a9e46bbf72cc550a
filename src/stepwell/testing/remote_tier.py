"""A stand-in for a tier that several wells share over a network: it knows only of what it has written or asked for, and
blocks appear and vanish without its doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepwell.block.namespace import BlockId
from stepwell.io.executor import Executor
from stepwell.testing.dict_tier import DictTier, Kept
from stepwell.tiers.base import Outgoing, ProbeDone, Reading, Writing

Store = dict[BlockId, Kept]
"""The content that all wells share. A test that takes something out or puts something in plays another well."""


class RemoteTier(DictTier):
    """Holds at most `limit` bytes of `store`. `probes` counts how often it was asked. Jobs of the executor answer, as
    late as that likes."""

    name = "remote"

    def __init__(self, limit: int, executor: Executor, store: Store) -> None:
        super().__init__(limit, executor)
        self.blocks = store
        self.known: set[BlockId] = set()
        self.probes = 0

    def lookup(self, id: BlockId) -> bool:
        return id in self.known

    def probe(self, ids: Sequence[BlockId], done: ProbeDone) -> None:
        self.probes += 1
        found: list[BlockId] = []

        def job() -> None:
            found.extend(id for id in ids if id in self.blocks)

        def ended(error: BaseException | None) -> None:
            self.known.update(id for id in found if id in self.blocks)  # not what was cleared meanwhile
            done(Reading.FAILED if error is not None else Reading.GOOD if found else Reading.ABSENT)

        self._executor.submit(job, ended)

    def drop(self, id: BlockId) -> None:
        super().drop(id)
        self.known.discard(id)

    def recover(self, done: Callable[[int], None]) -> None:
        """Nothing is known at first: others may have changed what an earlier life knew."""
        self._executor.submit(lambda: None, lambda _: done(0))

    def _keep(self, block: Outgoing, frames: bytes) -> Writing:
        answer = super()._keep(block, frames)
        if answer is Writing.STORED:
            self.known.add(block.id)
        return answer
