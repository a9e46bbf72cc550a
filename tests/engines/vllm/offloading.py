"""vLLM's own offloading with our tier below it: its manager alone, or all of an engine but the model.

`Offloading` drives vLLM's real manager as its scheduler does, over vLLM's real region of host memory; what the GPU
would copy is written into rows and read from them here. `offloading_setup` is for the harness, in which vLLM's real
scheduler and connector do the same for requests.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from stepwell.client import scheduler
from stepwell.engines.vllm.offloading import opening
from stepwell.engines.vllm.tier import StepwellTier
from stepwell.hierarchy.local import LocalWell
from stepwell.io.memory import Mapping

from .build import Setup, build
from .local import open_well

SHIM = Path(__file__).parents[3] / "benchmarks" / "peers"
sys.path.insert(0, str(SHIM))  # vLLM imports the module by its name

LOOKS_S = 0.0002
AT_MOST_S = 60.0


def offloading_setup(folder: Path, *, rows: int, tier: dict[str, Any] | None = None, **fields: Any) -> Setup:
    """An engine whose CPU tier has so many rows of one page each."""
    settings = {"type": "stepwell", "home": str(folder / "home"), "weights_id": "w", **(tier or {})}
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "peers_cpu_shim",
        "cpu_bytes_to_use": rows * 4096,
        "offload_prompt_only": False,
        "secondary_tiers": [settings],
        **fields.pop("extra", {}),
    }
    return Setup("OffloadingConnector", folder / "model", extra=extra, load_failure_policy="recompute", **fields)


@contextmanager
def joining(well: LocalWell) -> Iterator[None]:
    """Tiers made in here join this well, without threads of the client."""
    with (
        patch.object(Mapping, "populate", lambda *_, **__: None),
        patch.object(StepwellTier, "dialler", staticmethod(lambda wanted: lambda: well.dial)),
        patch.object(StepwellTier, "threaded", False),
    ):
        yield


@contextmanager
def patient() -> Iterator[None]:
    """Clients made in here wait for a disk however busy this machine is."""
    with patch.object(opening, "READING_S", 30.0), patch.object(scheduler, "UNANSWERED_S", 30.0):
        yield


class Offloading:
    """One engine's offloading manager with our tier as its only secondary one. `change` may change vLLM's
    configuration before."""

    def __init__(
        self,
        folder: Path,
        *,
        rows: int = 64,
        tier: dict[str, Any] | None = None,
        change: Callable[[Any], None] = lambda config: None,
        **fields: Any,
    ) -> None:
        built = build(offloading_setup(folder, rows=rows, tier=tier, **fields))
        self.config = built.vllm_config
        change(self.config)
        self.manager = self._manager(self.config, built.scheduler_kv)
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    @staticmethod
    def _manager(vllm_config: Any, kv_cache_config: Any) -> Any:
        """As vLLM's connector makes it, whose constructor has both configurations."""
        return TieringOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config)).get_manager()

    @property
    def tier(self) -> StepwellTier:
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, StepwellTier)
        return tier

    def request(self, name: str) -> ReqContext:
        context = ReqContext(name)
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def wait(self) -> None:
        """Steps until no job is under way."""
        for _ in range(int(AT_MOST_S / LOOKS_S)):
            self.step()
            if not self.manager.has_pending_work():
                return
            time.sleep(LOOKS_S)  # threads copy meanwhile
        raise AssertionError("a job does not end")

    def store(self, keys: Sequence[bytes], name: str = "store") -> None:
        """The engine has computed these chunks; the tier has had its chance to take them."""
        context = self.request(name)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None, "the CPU tier is full"
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
            self.rows[row] = content(key, self.rows.shape[1])
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
        self.wait()
        self.finish(context)

    def forget(self) -> None:
        """The CPU tier holds nothing any more, as after other prompts; the secondary tier is not told."""
        self.manager.primary_tier.reset_cache()

    def reset(self) -> None:
        """As where weights may have changed, when all copies of before have ended."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33 promotes nothing before it
            self.manager.on_reset_flushed()

    def look(self, keys: Sequence[bytes], context: ReqContext) -> int | None:
        """One pass of the scheduler over a request's keys: leading hits, None if it is deferred."""
        hits, deferred = 0, False
        for key in keys:
            result = self.manager.lookup(key, context)
            deferred |= result in (LookupResult.RETRY, LookupResult.HIT_PENDING)
            hits += result is LookupResult.HIT
            if result is LookupResult.MISS:
                break
        return None if deferred else hits

    def hits(self, keys: Sequence[bytes], context: ReqContext, *, passes: int = int(AT_MOST_S / LOOKS_S)) -> int:
        """How many leading chunks the engine finds, once nothing is deferred."""
        for _ in range(passes):
            hits = self.look(keys, context)
            self.step()
            if hits is not None:
                return hits
            time.sleep(LOOKS_S)
        raise AssertionError("a lookup is deferred for ever")

    def assert_loaded(self, keys: Sequence[bytes], context: ReqContext) -> None:
        """The rows of these chunks, which were hits, hold what was stored."""
        spec = self.manager.prepare_load(keys, context)
        for key, row in zip(keys, spec.chunk_ids.tolist(), strict=True):
            assert bytes(self.rows[row]) == content(key, self.rows.shape[1]).tobytes()
        self.manager.complete_load(keys, context)

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()


@contextmanager
def offloading(
    folder: Path, well: LocalWell | None = None, *, host: str = "32MiB", **fields: Any
) -> Iterator[Offloading]:
    """One engine's offloading on this well, or on one of its own whose books are checked at the end."""
    if well is None:
        with open_well(host) as own, offloading(folder, own, **fields) as engine:
            yield engine
            own.check()
        return
    with joining(well):
        engine = Offloading(folder, **fields)
        try:
            yield engine
        finally:
            engine.close()


def keys_of(prompt: str, chunks: int, group: int = 0) -> list[bytes]:
    """Names of a prompt's chunks as vLLM makes them: a hash of all tokens before, and the number of the cache group."""
    found, parent = [], b""
    for number in range(chunks):
        parent = hashlib.sha256(parent + f"{prompt}/{number}".encode()).digest()
        found.append(make_offload_key(parent, group))
    return found


def content(key: bytes, nbytes: int) -> Any:
    """Bytes that no other chunk has."""
    return np.resize(np.frombuffer(hashlib.shake_256(key).digest(1024), np.uint8), nbytes)
