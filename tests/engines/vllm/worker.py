"""The worker half of a connector with a model runner around it that computes hashes instead of attention.

One `WorkerHalf` per rank: its own config copy, connector instance (role WORKER), KV tensors made by vLLM's own
allocator, and block tables kept from the plans alone, as a model runner keeps them. It calls the connector through the
classes that vLLM's own runners use for it, so hooks come in the order of the installed version. Used by the harness.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from .build import VOCAB, Built, Setup, drafted_name
from .oracle import POISON, Oracle, TokenChain, Words

TAINT = np.uint64(0xDEAD)  # mixed into KV and tokens computed over a context that was wrong


class ForwardFailed(Exception):
    """The failure a test asked for, raised out of a forward."""


@dataclass(frozen=True, slots=True)
class WrongKV:
    """Attention of `request_id` would have read bytes at `position` that are not the KV of its tokens."""

    step: int
    request_id: str
    rank: int
    layer: int
    position: int
    page_index: int
    """Of the page in the request's block table, the tuple below."""
    table: tuple[int, ...]
    found: str
    """"poison" (never written since its allocation) or "other bytes"."""

    def __str__(self) -> str:
        page = self.table[self.page_index]
        return (
            f"step {self.step}: wrong KV for {self.request_id} at token {self.position} (page {page}, number "
            f"{self.page_index} of its table), rank {self.rank}, layer {self.layer}: {self.found}"
        )


@dataclass(slots=True)
class _Row:
    chain: TokenChain
    tables: list[list[int]]
    """A block table for each cache group."""
    done: int | None = None
    """Tokens whose KV is the request's, once it decodes: plans that are made ahead count all drafts as accepted."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What one request does in this step: tokens `[start, stop)`, of which those from `wrong` on were drafted and are
    not the request's; and the next one behind each of the others from `known` on."""

    request_id: str
    row: _Row
    start: int
    stop: int
    known: int
    wrong: int


def drafts_of(chain: TokenChain, at: int, count: int) -> list[int]:
    """Tokens that are drafted behind the first `at`: none to all of them are right, in turn by place."""
    right = at * 7 // 3 % (count + 1)
    return [(chain.token(at + n) + (n >= right)) % VOCAB for n in range(count)]


class WorkerHalf:
    def __init__(self, rank: int, setup: Setup, built: Built, oracle: Oracle) -> None:
        self.rank, self._setup = rank, setup
        self._shard = rank // setup.replicas  # ranks that hold the same heads compute the same KV
        self.oracle = oracle
        self.config = pickle.loads(pickle.dumps(built.vllm_config))
        self.config.parallel_config.rank = rank
        kv_config = built.worker_kv[rank]
        self.config.cache_config.num_gpu_blocks = kv_config.num_blocks
        record_kv_cache_layout(self.config.cache_config, kv_config.kv_cache_layout)
        self.config.cache_config.hash_block_size = kv_config.hash_block_size
        self.wrong: list[WrongKV] = []
        self._fresh: list[int] = []
        self._rows: dict[str, _Row] = {}
        with self.process():
            self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_config)
        with self.process():
            layout = KVCacheLayout[kv_config.kv_cache_layout]
            self.kv_caches = allocate_kv_cache(kv_config, torch.device("cpu"), layout)
            if setup.runner_v2:
                self._runner_v2 = ActiveKVConnector(self.config, self.kv_caches)
            else:
                self.connector.register_kv_caches(self.kv_caches)
                self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)
            self.handshake = self.connector.get_handshake_metadata()
        groups = [group for name in self.kv_caches for group in kv_config.kv_cache_groups if name in group.layer_names]
        self._groups = [kv_config.kv_cache_groups.index(group) for group in groups]
        specs = [group.kv_cache_spec for group in groups]
        self._pages = [int(spec.block_size) for spec in specs]
        self._windows = [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 1 << 62 for spec in specs]
        self._has_state = [isinstance(spec, MambaSpec) for spec in specs]
        self._chunks = [
            spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 1 << 62 for spec in specs
        ]
        names, drafted = list(self.kv_caches), drafted_name(setup)
        self._drafted = None if drafted is None else names.index(drafted)
        # Every layer as 64-bit words [page, head, slot, word], sharing memory with what the connector got.
        self.words: list[Words] = [t.view(torch.int64).numpy().view(np.uint64) for t in self.kv_caches.values()]
        told = self.connector.handle_preemptions

        def told_then_poison(metadata: object) -> None:
            told(metadata)
            if not setup.zeroed_first:
                self._poison()

        self.connector.handle_preemptions = told_then_poison

    def _poison(self) -> None:
        for layer in self.words:
            layer[self._fresh] = POISON

    @contextmanager
    def process(self) -> Iterator[None]:
        """Make this thread's process-wide state that of the rank's own process: its groups and its connector."""
        n, saved = self._setup.ranks, {}
        ranks = SimpleNamespace(
            rank=self.rank,
            local_rank=self.rank,
            rank_in_group=self.rank,
            world_size=n,
            ranks=list(range(n)),
            is_first_rank=self.rank == 0,
            is_last_rank=self.rank == n - 1,
        )
        alone = SimpleNamespace(
            rank=self.rank,
            local_rank=self.rank,
            rank_in_group=0,
            world_size=1,
            ranks=[self.rank],
            is_first_rank=True,
            is_last_rank=True,
        )
        for name, group in (("_TP", ranks), ("_WORLD", ranks), ("_PP", alone)):
            saved[name] = getattr(parallel_state, name)
            setattr(parallel_state, name, group)
        outside = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = getattr(self, "connector", None)
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = outside
            for name, group in saved.items():
                setattr(parallel_state, name, group)

    def shutdown(self) -> None:
        with self.process():
            self.connector.shutdown()

    def execute(self, plan: bytes, fresh: list[int], step: int, fail_after: int | None = None) -> bytes:
        """One step, as `execute_model` and `sample_tokens` of a model runner; returns the pickled output.

        `fresh` are the pages that the scheduler took from the free pool for this plan: poisoned once the connector has
        been told of preemptions, which is its last moment to keep what they held. Raises ForwardFailed after layer
        `fail_after`.
        """
        out: SchedulerOutput = pickle.loads(plan)
        self._fresh = fresh
        if self._setup.zeroed_first:
            self._poison()
        forward = self._forward_v2 if self._setup.runner_v2 else self._forward_v1
        with self.process():
            if not self._setup.runner_v2:
                self.connector.handle_preemptions(out.kv_connector_metadata)
            work = self._update_rows(out)
            if not work:
                return pickle.dumps(
                    self._runner_v2.no_forward(out)
                    if self._setup.runner_v2
                    else KVConnectorModelRunnerMixin.kv_connector_no_forward(out, self.config)
                )
            tainted, kv_output = forward(out, work, step, fail_after)
        sampled = [[self._token(w, at, w.request_id in tainted) for at in range(w.known, w.wrong + 1)] for w in work]
        ids = [w.request_id for w in work]
        index = {request_id: i for i, request_id in enumerate(ids)}
        return pickle.dumps(ModelRunnerOutput(ids, index, sampled, kv_connector_output=kv_output))

    def _forward_v1(
        self, out: SchedulerOutput, work: list[_Work], step: int, fail_after: int | None
    ) -> tuple[set[str], KVConnectorOutput]:
        metadata = {name: AttentionMetadata() for name in self.kv_caches}
        with (
            set_forward_context(metadata, self.config, num_tokens=out.total_num_scheduled_tokens),
            KVConnectorModelRunnerMixin._get_kv_connector_output(
                out, defer_finalize=self._drafted is not None
            ) as kv_output,
        ):
            tainted = self._forward(work, metadata, step, fail_after)
        if self._drafted is not None:
            self._draft(work, tainted, self._drafted, step)
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return tainted, kv_output

    def _forward_v2(
        self, out: SchedulerOutput, work: list[_Work], step: int, fail_after: int | None
    ) -> tuple[set[str], KVConnectorOutput]:
        metadata = {name: AttentionMetadata() for name in self.kv_caches}
        ids, states, count = [w.request_id for w in work], torch.arange(len(work)), out.total_num_scheduled_tokens
        if "input_batch" in inspect.signature(ActiveKVConnector.pre_forward).parameters:
            batch = SimpleNamespace(req_ids=ids, idx_mapping=states, num_tokens=count)
            about = {"input_batch": batch, "attn_metadata": metadata}
        else:  # before vLLM 0.32: what the connector is told, as the runner of that version passes it
            about = {"request_state_indices": states, "request_ids": ids, "num_tokens": count}
        with set_forward_context(metadata, self.config, num_tokens=out.total_num_scheduled_tokens):
            self._runner_v2.pre_forward(out, **about)
            tainted = self._forward(work, metadata, step, fail_after)
            self._runner_v2.finish_forward()
        if self._drafted is not None:
            self._draft(work, tainted, self._drafted, step)
        kv_output = self._runner_v2.post_forward(out.finished_req_ids)
        assert kv_output is not None
        return tainted, kv_output

    def _update_rows(self, out: SchedulerOutput) -> list[_Work]:
        gone = out.finished_req_ids | out.preempted_req_ids if self._setup.runner_v2 else out.finished_req_ids
        for request_id in gone:
            self._rows.pop(request_id, None)
        work = []

        def add(request_id: str, computed: int, known: int) -> None:
            row = self._rows[request_id]
            drafted = out.scheduled_spec_decode_tokens.get(request_id, [])
            if self._setup.async_scheduling and self._setup.drafts and row.done is not None:
                computed, known = row.done, row.done + 1  # what was accepted is known here alone
                drafted = drafts_of(row.chain, known, len(drafted))
            stop = computed + out.num_scheduled_tokens[request_id]
            pages = min(len(row.tables[group]) * page for group, page in zip(self._groups, self._pages, strict=True))
            assert stop <= pages, f"{request_id} has no page for its tokens"
            assert not drafted or stop == known + len(drafted)
            right = takewhile(lambda pair: pair[1] == row.chain.token(pair[0]), enumerate(drafted, known))
            final = min(stop, known + len(list(right)))
            row.done = final if stop >= known else None
            work.append(_Work(request_id, row, computed, stop, known, final))

        for new in out.scheduled_new_reqs:
            chain = self.oracle.chain(new.prompt_token_ids)
            self._rows[new.req_id] = _Row(chain, [list(ids) for ids in new.block_ids])
            add(new.req_id, new.num_computed_tokens, len(new.prefill_token_ids or new.prompt_token_ids))
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            row = self._rows[request_id]
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert new_ids is not None
                row.tables = [list(ids) for ids in new_ids]  # a resumed request's tables replace the old ones
                row.done = None
            elif new_ids is not None:
                for table, ids in zip(row.tables, new_ids, strict=True):
                    table.extend(ids)
            add(request_id, cached.num_computed_tokens[i], row.chain.prompt_len + cached.num_output_tokens[i])
        return work

    def _forward(
        self, work: list[_Work], metadata: dict[str, AttentionMetadata], step: int, fail_after: int | None
    ) -> set[str]:
        """Layer by layer: write the KV of the step's tokens, then check all KV that attention reads.

        Returns the requests whose context was wrong; what they write from there on is wrong as well, as it would be
        in a model, so that a connector that keeps it is found out later.
        """
        tainted: set[str] = set()
        for layer, (name, tensor) in enumerate(self.kv_caches.items()):
            if layer == self._drafted:
                continue
            self.connector.wait_for_layer_load(name)
            for w in work if self._has_state[layer] else ():
                if w.request_id not in tainted and (wrong := self._check_state(w, layer, step)) is not None:
                    self.wrong.append(wrong)
                    tainted.add(w.request_id)
                self._write_state(w, layer, w.request_id in tainted)
            for w in work if not self._has_state[layer] else ():
                self._write(w, layer, w.request_id in tainted)
            for w in work if not self._has_state[layer] else ():
                if w.request_id not in tainted and (wrong := self._check(w, layer, step)) is not None:
                    self.wrong.append(wrong)
                    tainted.add(w.request_id)
                    self._write(w, layer, tainted=True)
            self.connector.save_kv_layer(name, tensor, metadata[name])
            if layer == fail_after:
                raise ForwardFailed(f"asked to fail after layer {layer} in step {step}")
        return tainted

    def _draft(self, work: list[_Work], tainted: set[str], layer: int, step: int) -> None:
        """The drafter's forward: it writes its KV of tokens that are final, and something for the drafts that it makes
        of them, and then checks all that it attends to. What is wrong there costs drafts and no answer, so nothing is
        tainted by it.

        With hidden states of the model it looks one token ahead. So its KV of a page's last token may be that of
        another request, which had the page too and went on differently: that is left out.
        """
        page, held = self._pages[layer], self.words[layer]
        for w in work:
            rows, pages, slots = self._drafted_rows(w, layer)
            held[pages[w.start :], :, slots[w.start :]] = rows[w.start :]
        for w in (w for w in work if w.request_id not in tainted):
            rows, pages, slots = self._drafted_rows(w, layer)
            differs = (held[pages, :, slots] != rows).any(axis=(1, 2))[: w.start]
            if self._setup.drafter != "draft_model":
                differs[page - 1 :: page] = False
            if differs.any():
                at = int(differs.argmax())
                found = "poison" if (held[pages[at], :, slots[at]] == POISON).any() else "other bytes"
                table = tuple(self._table(w, layer))
                self.wrong.append(WrongKV(step, w.request_id, self.rank, layer, at, at // page, table, found))

    def _drafted_rows(self, w: _Work, layer: int) -> tuple[Words, np.ndarray, np.ndarray]:
        """What a drafter's layer has of the request when its step has ended, junk of its drafts included, and where."""
        ahead, page = int(self._setup.drafter != "draft_model"), self._pages[layer]
        at = np.arange(min(len(self._table(w, layer)) * page, w.wrong + self._setup.drafts))
        rows = self.oracle.rows(w.row.chain.hashes(ahead, len(at) + ahead), layer, self._shard)
        rows[w.wrong :] ^= TAINT
        return rows, np.asarray(self._table(w, layer))[at // page], at % page

    def _state_of(self, w: _Work, layer: int, tokens: int) -> Words:
        """The state behind so many tokens: two of what a token has, as with a convolution before."""
        rows = self.oracle.rows(w.row.chain.hashes(tokens - 1, tokens), layer, self._shard)
        return np.concatenate([rows.ravel(), ~rows.ravel()])

    def _check_state(self, w: _Work, layer: int, step: int) -> WrongKV | None:
        """The state that the step goes on from."""
        if not w.start:
            return None
        index = (w.start - 1) // self._pages[layer]
        page = self._table(w, layer)[index]
        state = self._state_of(w, layer, w.start)
        held = self.words[layer][page].ravel()[: len(state)]
        if (held == state).all():
            return None
        found = "poison" if (held == POISON).any() else "other bytes"
        return WrongKV(step, w.request_id, self.rank, layer, w.start - 1, index, tuple(self._table(w, layer)), found)

    def _write_state(self, w: _Work, layer: int, tainted: bool) -> None:
        page = self._table(w, layer)[-(-w.stop // self._pages[layer]) - 1]
        state = self._state_of(w, layer, w.stop)
        self.words[layer][page].reshape(-1)[: len(state)] = state ^ TAINT if tainted else state

    def _table(self, w: _Work, layer: int) -> list[int]:
        return w.row.tables[self._groups[layer]]

    def _slots(self, w: _Work, start: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        positions, page = np.arange(start, w.stop), self._pages[layer]
        return np.asarray(self._table(w, layer))[positions // page], positions % page

    def _rows_of(self, w: _Work, start: int, layer: int) -> np.ndarray:
        rows = self.oracle.rows(w.row.chain.hashes(start, w.stop), layer, self._shard)
        rows[max(0, w.wrong - start) :] ^= TAINT
        return rows[..., : self.words[layer].shape[-1]]

    def _write(self, w: _Work, layer: int, tainted: bool) -> None:
        pages, slots = self._slots(w, w.start, layer)
        rows = self._rows_of(w, w.start, layer)
        self.words[layer][pages, :, slots] = rows ^ TAINT if tainted else rows

    def _check(self, w: _Work, layer: int, step: int) -> WrongKV | None:
        chunk = self._chunks[layer]
        first = max(w.start // chunk * chunk, w.start + 1 - self._windows[layer])  # that the step's first attends to
        pages, slots = self._slots(w, first, layer)
        held = self.words[layer][pages, :, slots]
        differs = (held != self._rows_of(w, first, layer)).any(axis=(1, 2))
        if not differs.any():
            return None
        row = int(differs.argmax())
        found = "poison" if (held[row] == POISON).any() else "other bytes"
        at = first + row
        index = at // self._pages[layer]
        return WrongKV(step, w.request_id, self.rank, layer, at, index, tuple(self._table(w, layer)), found)

    def _token(self, w: _Work, at: int, tainted: bool) -> int:
        token = w.row.chain.token(at)
        return (token + int(TAINT)) % VOCAB if tainted else token
