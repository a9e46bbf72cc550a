"""The reports of one rank on their way to the scheduler, which a test may hold up."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from vllm.v1.outputs import KVConnectorOutput


class Reports:
    """Passes reports through, or keeps them while `hold` is set and then lets one arrive per step, in order.

    Failed page ids are never held: they belong to the step that reports them, and a late one would be a fault of the
    harness rather than of a slow rank.
    """

    def __init__(self) -> None:
        self.hold = False
        self._queue: deque[KVConnectorOutput] = deque()

    def arriving(self, sent: KVConnectorOutput | None) -> KVConnectorOutput | None:
        """What the scheduler gets in the step in which the rank sent this."""
        if not self.hold and not self._queue:
            return sent
        failed = sent.invalid_block_ids if sent is not None else set()
        if sent is not None:
            kept = replace(sent, invalid_block_ids=set())
            if not kept.is_empty():
                self._queue.append(kept)
        arrives = self._queue.popleft() if self._queue and not self.hold else KVConnectorOutput()
        return replace(arrives, invalid_block_ids=failed)
