"""An engine without a model that recalls runs of blocks into memory of its own, streamed or staged.

Streamed: as soon as the well knows where a run lies, it is recalled, and each block is copied as it lands. Staged: all
of the run has landed before the first block is copied. Either way a thread of its own copies each run, as in an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lab.rig.caller import content
from lab.rig.session import BLOCK_TOKENS, Session, slot
from lab.rig.well import eventually
from stepwell.block.digest import Chain
from stepwell.client.questions import PrefixQuestion, SlotRefs
from stepwell.client.worker import Hold, WorkerClient

_POLL_S, _LOOK_S = 1e-4, 5e-3
_AT_ONCE = 8
"""Blocks that are reserved together, which a small arena has room for."""


class Run:
    """`blocks` of `nbytes` each, and the memory that they are copied to. `seed`: other runs have other blocks."""

    def __init__(self, seed: int, blocks: int, nbytes: int) -> None:
        chain = Chain(BLOCK_TOKENS)
        chain.extend(np.random.default_rng(seed).integers(0, 32_000, blocks * BLOCK_TOKENS).tolist())
        self.digests = chain.digests
        self.memory = np.ones((blocks, nbytes), np.uint8)

    @property
    def blocks(self) -> int:
        return len(self.memory)

    def digest(self, at: int) -> bytes:
        return self.digests[32 * at : 32 * at + 32]

    def wrong(self) -> int:
        """Blocks whose bytes in the memory are not theirs."""
        nbytes = self.memory.shape[1]
        return sum(not np.array_equal(row, content(self.digest(at), nbytes)) for at, row in enumerate(self.memory))


class Engine(Session):
    """`pieces`: called when a piece of a stream was copied."""

    def __init__(self, home: Path, nbytes: int, *, worker: type[WorkerClient] = WorkerClient) -> None:
        super().__init__(home, nbytes, label="bench", worker=worker)
        self.join()
        self.pieces: Callable[[], None] = lambda: None
        self._threads = ThreadPoolExecutor(8)
        self._order = 0

    def spill(self, run: Run, stats: Callable[[], Mapping[str, object]]) -> None:
        """Has the well, whose `stats` these are, take all of the run and write it to its disk."""
        at = 0
        while at < run.blocks:
            spill = self.reserve(run.digests[32 * at : 32 * (at + _AT_ONCE)])
            assert spill is not None, f"the session has ended: {self.troubles}"
            taken = 0
            with self.worker.copying() as hold:
                for _, block, memory in self.slots(hold, spill):
                    memory[:] = content(run.digest(at + block), self.shard_bytes)
                    taken = block + 1
                    del memory  # no view of a slot may outlive the hold
            self.acknowledge(spill)
            at += taken if spill.reason else spill.blocks
            eventually(lambda: not stats()["disk_write_queue_bytes"], "blocks are written")

    def recall(self, *runs: Run, streamed: bool) -> list[tuple[float, int]]:
        """Recalls runs that are asked for at the same time: for each, the seconds until its last block was copied, and
        how many blocks were."""
        began, waiting = time.perf_counter(), {}
        for run in runs:
            self._order += 1
            ask = self.scheduler.ask(run.digests, 0, self._order)
            assert ask is not None, f"the session has ended: {self.troubles}"
            waiting[run] = ask
        copies: dict[Run, Future[tuple[float, int]]] = {}
        while waiting:
            for run, ask in list(waiting.items()):
                if self.scheduler.settle(ask, 0.0) or (streamed and ask.ends):
                    copies[run] = self._threads.submit(self._take, run, waiting.pop(run), streamed)
            time.sleep(_POLL_S)
        ended = [copies[run].result() for run in runs]
        return [(seconds - began, blocks) for seconds, blocks in ended]

    def _take(self, run: Run, ask: PrefixQuestion, streamed: bool) -> tuple[float, int]:
        """When the copy of the run ended, and how many of its blocks are there."""
        blocks = self.scheduler.offer(ask, streamed=streamed)
        if not blocks:
            self.scheduler.release(ask)
            return time.perf_counter(), 0
        copied = 0
        with self.worker.copying() as hold:
            if streamed:
                transfer, limits = self.scheduler.stream(ask, 0, blocks)
                with self.worker.stream(ask.session, transfer, limits) as stream:
                    while copied < blocks:
                        over = stream.over
                        refs = stream.next(0.0 if over else _LOOK_S)
                        if refs is not None:
                            copied += self._piece(hold, ask.session, run, copied, refs)
                            self.worker.copied(ask.session, transfer, copied)
                            self.pieces()
                        elif over:
                            break
            else:
                transfer, refs = self.scheduler.recall(ask, 0, blocks)
                copied = self._piece(hold, ask.session, run, 0, refs)
        ended = time.perf_counter()
        self.worker.recalled(ask.session, [transfer])
        self.scheduler.stream_ended(transfer)
        return ended, copied

    def _piece(self, hold: Hold, session: int, run: Run, first: int, refs: SlotRefs) -> int:
        """Copies these blocks of the run; how many."""
        for at, (ref,) in enumerate(refs, first):
            self.copy_block(hold, session, run, at, ref)
        return len(refs)

    def copy_block(self, hold: Hold, session: int, run: Run, at: int, ref: np.void) -> None:
        """Raises IntegrityError where the slot has not held what was leased."""
        run.memory[at] = slot(hold, session, ref)
        self.worker.verify(session, *ref.item())

    def close(self) -> None:
        self._threads.shutdown()
        super().close()
