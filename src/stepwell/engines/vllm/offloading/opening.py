"""From what vLLM's offloading gives a tier to a session with a well.

A tier is told of the offloading alone, not of the engine: which weights it runs, how its pages lie, which hash names
its blocks. All of that decides whether bytes may be shared, so it is taken from the engine's own configuration, which
lies in the frames that are constructing the tier (ADR 27).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.kv_offload.base import Locality

from stepwell.block.facts import digest_of
from stepwell.block.frame import MAX_PAYLOAD
from stepwell.client import scheduler, worker
from stepwell.client.finder import finder
from stepwell.client.fingerprint import CACHE_NAME
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.patience import Patience
from stepwell.engines.common import log_messages
from stepwell.engines.common.weights import WeightsIdentity
from stepwell.engines.vllm import settings
from stepwell.engines.vllm.identity.drafts import unsupported_drafts
from stepwell.engines.vllm.identity.facts import layout_facts, model_facts, told
from stepwell.engines.vllm.identity.unsupported import unrepeatable
from stepwell.engines.vllm.identity.values import canonical, no_option, refusal
from stepwell.engines.vllm.identity.weights import weight_files
from stepwell.engines.vllm.offloading.key_runs import ChunkGroup
from stepwell.engines.vllm.settings import MIN_WINDOW, ConnectorSettings
from stepwell.errors import ConfigError, IdentityMismatch, StepwellError, Unsupported
from stepwell.protocol.link import Dial
from stepwell.units import format_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

T = TypeVar("T")

WINDOW_CHUNKS = 32
"""Chunks that the arena of a well that a tier starts has room for, if its user says nothing: they only pass through it,
since vLLM's own host memory is what keeps the hot ones."""

SECTION = "secondary_tiers"
"""Where the tier's keys stand in vLLM's configuration."""

_NAME = 38
"""Characters of a model's name, so that a well shows the whole label, of which it takes 64."""

READING_S, MIN_SPEED = 1.0, 256 << 20
"""Seconds that a request waits for the next chunk that the well reads, as long as a read may take before a tier counts
as failing; and bytes a second below which a read of many chunks is given up. Nothing is known here of what computing
costs, nor told to the well."""

_CONNECTORS_ONLY = ("block_tokens", "canary", "receipts")


def find_in_callers(kind: type[T]) -> T | None:
    """The nearest local variable of this type in the frames that have led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, kind):
                return value
        frame = frame.f_back
    return None


def locality(given: object) -> Locality | None:
    """The tier's key `locality`, which is vLLM's. Raises ConfigError."""
    known = [member.value for member in Locality]
    if given is None or given in known:
        return None if given is None else Locality(given)
    raise ConfigError(
        "SW-102",
        what=f"{SECTION}: locality = {given!r}",
        why=f"vLLM knows {' and '.join(known)}",
        fix="use one of these, or leave it out",
    )


def parse(given: Mapping[str, Any]) -> ConnectorSettings:
    """The tier's keys but those that vLLM knows itself. Raises ConfigError."""
    for key in _CONNECTORS_ONLY:
        if key in given:
            raise ConfigError(
                "SW-102",
                what=f"{SECTION}: {key} = {given[key]!r}",
                why=f"{key} is a setting of StepwellConnector: here vLLM makes chunks and writes answers",
                fix=f"remove {key}" + (", and set vLLM's block_size" if key == "block_tokens" else ""),
            )
    return settings.parse(given, page=1, where=SECTION)


def options_of(wanted: ConnectorSettings, chunk_bytes: int) -> dict[str, str | int | float]:
    """Settings of a well that may have to be started. All of its arena may wait to be written: a chunk that had to
    leave unwritten would not be offered again, and vLLM's rows wait as well."""
    options = dict(wanted.options)
    options.setdefault("host", f"{max(MIN_WINDOW, WINDOW_CHUNKS * chunk_bytes) >> 20}MiB")
    if "disk" in options:
        options.setdefault("disk_queue", options["host"])
    return options


def unsupported(config: VllmConfig) -> StepwellError | None:
    """The first thing about this engine that its chunks do not tell apart, or None."""
    parallel = config.parallel_config
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        where = f"nnodes={parallel.nnodes}, executor {parallel.distributed_executor_backend!r}"
        return refusal("SW-705", where, "all rows must lie in one host's memory", "run the engine on one host")
    if config.lora_config is not None:
        why = "vLLM's hashes name an adapter and say nothing of its weights"
        return no_option("LoRA below vLLM's offloading", why, "use StepwellConnector, or no adapters")
    return unsupported_drafts(config) or unrepeatable(config)


def unseeded(config: VllmConfig) -> IdentityMismatch | None:
    """Why no later start finds what this one stores; None: it does."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("sha256") or "PYTHONHASHSEED" in os.environ:
        return None
    return IdentityMismatch(
        "SW-408",
        what=f"vLLM's block hashes ({algorithm}) differ from start to start",
        why="this algorithm is seeded at random, so nothing is found again after a restart",
        fix="use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to the same number at every start",
    )


def chunk_facts(spec: Any, config: VllmConfig, chunk_bytes: int) -> dict[str, str]:
    """What a row holds, in which order, and what names it, beside what `layout_facts` says of pages."""
    offloading = spec.config
    parallel = {
        name: getattr(offloading.parallel, name)
        for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    }
    return {
        "door": "vllm secondary tier",
        "chunk.bytes": str(chunk_bytes),
        "chunk.blocks": canonical(offloading.cache.blocks_per_chunk),
        "chunk.tokens_per_hash": canonical(offloading.cache.tokens_per_hash),
        "chunk.groups": canonical(offloading.groups),
        "chunk.ranks": canonical(parallel),
        "chunk.replicated": canonical(offloading.replicated_layout),
        "chunk.canonical": canonical(getattr(offloading, "canonical_layout", False)),
        "chunk.layout": canonical(getattr(offloading, "kv_cache_layout", None)),
        "hash": canonical(str(config.cache_config.prefix_caching_hash_algo)),
    }


def groups(spec: Any, kv_cache_config: KVCacheConfig) -> dict[int, ChunkGroup]:
    """The engine's cache groups, by their number in keys, with the windows that vLLM looks for."""
    found: dict[int, ChunkGroup] = {}
    for group in spec.config.groups:
        tokens = group.tokens_per_block * spec.blocks_per_chunk
        if hasattr(group, "sliding_window_size_in_chunks"):  # since vLLM 0.33
            window = group.sliding_window_size_in_chunks
        else:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as of_vllm

            of_engine = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
            window = of_vllm.get_sliding_window_size_in_chunks(of_engine, tokens)
        found[group.group_id] = ChunkGroup(tokens, window)
    return found


@dataclass(frozen=True, slots=True)
class TierSession:
    """Both members of one tier's session, in the scheduler's process: vLLM's rows are of all ranks, so there is one
    shard and one worker."""

    client: scheduler.SchedulerClient
    worker: worker.WorkerClient
    weights: WeightsIdentity

    def close(self) -> None:
        self.worker.close()
        self.client.close()
        self.weights.close()


def open_session(
    spec: Any,
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    wanted: ConnectorSettings,
    chunk_bytes: int,
    *,
    dialler: Callable[[ConnectorSettings], Callable[[], Dial]] | None = None,
    threaded: bool = True,
) -> TierSession:
    """Raises StepwellError for what keeps the tier from serving."""
    if (error := unsupported(config)) is not None:
        raise error
    if chunk_bytes > MAX_PAYLOAD:
        raise ConfigError(
            "SW-102",
            what=f"chunks of {format_size(chunk_bytes)} of all ranks",
            why=f"a block in a well has at most {format_size(MAX_PAYLOAD)}",
            fix="a smaller block_size, or fewer blocks_per_chunk, in kv_connector_extra_config",
        )
    starting = replace(wanted, options=options_of(wanted, chunk_bytes))  # what was not asked for is no reason to warn
    find = dialler or (lambda wanted: finder(wanted.home, wanted.socket, wanted.options))
    if wanted.strict:
        find(starting)()
    pages = layout_facts(config, kv_cache_config) | chunk_facts(spec, config, chunk_bytes)
    model = model_facts(config)
    engine = f"{config.kv_transfer_config.engine_id}-tier"
    group = spec.config.groups[0]
    layout = digest_of(pages)
    who = EngineIdentity(
        engine=engine,
        world=1,
        shard_bytes=chunk_bytes,
        block_tokens=group.tokens_per_block * spec.blocks_per_chunk,
        layout=layout,
        model=digest_of(model),
        label=f"{Path(str(config.model_config.model)).name[:_NAME]} (below vLLM's offloading)",
        facts=told(pages | model),
    )
    weights = WeightsIdentity(wanted.weights_id, lambda: weight_files(config), wanted.home / CACHE_NAME)
    member = worker.WorkerClient(
        WorkerIdentity(engine, 0, 1, chunk_bytes, layout),
        find(starting),
        trouble=log_messages.worker_trouble,
        options=wanted.options,
        threaded=threaded,
    )
    try:
        client = scheduler.SchedulerClient(
            who,
            weights,
            find(starting),
            options=wanted.options,
            trouble=log_messages.trouble,
            joined=lambda welcome: log_messages.joined(welcome, who),
            patience=Patience(reading_s=READING_S, block_s=chunk_bytes / MIN_SPEED),
            threaded=threaded,
        )
    except BaseException:
        member.close()
        weights.close()
        raise
    return TierSession(client, member, weights)


def not_found(kind: str) -> Unsupported:
    return Unsupported(
        "SW-710",
        what="this vLLM lacks something that stepwell needs",
        why=f"no {kind} was found where the tier is constructed, so the model cannot be identified",
        fix="use StepwellConnector, or report the version of vLLM to stepwell",
    )
