"""Both halves of the vLLM adapter, in one process, as members of a well that runs elsewhere on this machine."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.gpu.engine.kv import Kv
from lab.bench.wells import PATIENCE_S
from lab.rig.well import POLL_S, eventually
from stepwell.block.facts import digest_of
from stepwell.block.layout import block_tokens_for
from stepwell.block.namespace import LOADED_FROM_FILES
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.patience import PATIENCE, Patience
from stepwell.client.questions import Spill
from stepwell.client.scheduler import MAX_RESERVED, SchedulerClient
from stepwell.client.socket import dial
from stepwell.client.start import find
from stepwell.client.worker import WorkerClient
from stepwell.engines.common.plan import Shape
from stepwell.engines.common.worker_half import WorkerHalf
from stepwell.engines.paged import open_copies
from stepwell.engines.paged.base import Copies
from stepwell.engines.vllm.scheduler.half import SchedulerHalf
from stepwell.errors import StepwellError


@dataclass(slots=True, eq=False)
class Halves:
    """`told`: what went wrong, as a user would read it."""

    shape: Shape
    copies: Copies
    scheduler: SchedulerHalf
    worker: WorkerHalf
    client: SchedulerClient
    mapper: WorkerClient
    told: list[str]

    def wait_ready(self) -> None:
        """Until the session is complete and a slab is mapped. Raises TimeoutError."""
        try:
            eventually(lambda: self.client.live and self.mapper.mapped > 0, "a session, and a slab", PATIENCE_S, POLL_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {'; '.join(self.told) or 'nothing was told'}") from None

    def grow(self, nbytes: int, patience_s: float = 60.0) -> None:
        """Until the arena has slots for so many bytes, mapped here: then spills do not wait for memory. Slots are
        reserved and given up again, nothing is copied. Raises TimeoutError."""
        deadline, spills, granted = time.monotonic() + patience_s, list[Spill](), 0
        try:
            while granted * self.shape.block_bytes < nbytes:
                over = time.monotonic() > deadline
                spill = None if over else self.client.reserve(b"", os.urandom(32 * MAX_RESERVED), LOADED_FROM_FILES)
                if spill is None:
                    raise TimeoutError(f"the arena has slots for {granted * self.shape.block_bytes} of {nbytes} bytes")
                spills.append(spill)
                eventually(lambda: spills[-1].granted, "a reservation is answered", PATIENCE_S, POLL_S)
                granted += sum(1 for lease in spill.leases if lease)
        finally:
            for spill in spills:
                self.client.abandon(spill, 0)

    def close(self) -> None:
        self.worker.close()
        self.client.close()
        self.mapper.close()

    def __enter__(self) -> Halves:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_halves(
    home: Path,
    kv: Kv,
    *,
    block_tokens: int = 0,
    model: str = "bench",
    copies: Copies | None = None,
    patience: Patience = PATIENCE,
) -> Halves:
    """Members of the well of `home`. `block_tokens` 0: what stepwell chooses for these pages. `model`: of the same name
    share blocks. Raises as `open_copies` does."""
    copies = copies or open_copies(kv.caches, kv.shape.pages)
    page = kv.shape.page
    tokens = block_tokens or block_tokens_for(page, copies.page_bytes)
    shape = Shape(page, tokens, copies.page_bytes * tokens // page, 1)
    engine, told = secrets.token_hex(8), list[str]()
    layout = digest_of({"layout": kv.layout.value, "page_bytes": str(copies.page_bytes)})

    def find_well() -> Callable[..., Any]:
        return dial(find(home))

    def trouble(error: StepwellError) -> None:
        told.append(str(error))

    mapper = WorkerClient(
        WorkerIdentity(engine, 0, 1, shape.shard_bytes, layout), find_well, trouble=trouble, prepare=copies.prepare
    )
    weights = digest_of({"model": model})
    client = SchedulerClient(
        EngineIdentity(engine, 1, shape.shard_bytes, tokens, layout, weights, model),
        lambda: weights,
        find_well,
        trouble=trouble,
        patience=patience,
    )
    scheduler = SchedulerHalf(shape, client, lambda hook, error: told.append(f"{hook}: {error!r}"))
    worker = WorkerHalf(0, shape.shard_bytes, copies, mapper)
    return Halves(shape, copies, scheduler, worker, client, mapper, told)
