"""The half of the connector that lives beside vLLM's scheduler: decides what to recall and what to spill.

A block's way out:  planned in step N -> slots reserved while N runs -> N confirmed by all ranks -> copied in step N+1
A request's way in: asked when it arrives -> offered when the scheduler asks -> loads planned at its allocation

Nothing here waits for the well, except at most a millisecond at a request's first ask. Hooks are called in any order
and number (facts are in docs/design/vllm.md); state is cleaned up by `finished_req_ids` and the worker's reports.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from stepwell.block.digest import Chain, salt_extras
from stepwell.block.namespace import LOADED_FROM_FILES
from stepwell.client.scheduler import MOST_RESERVED, SchedulerClient
from stepwell.engines.vllm.plan import Load, Save, StepPlan, StepReport
from stepwell.engines.vllm.requests import Pending, Tracked

FIRST_ASK_WAIT_S = 0.001
HOLD_S = 0.1
"""Longest time that a finished request's pages are held for slots that were reserved but not granted yet."""

SAVE_BYTES_PER_STEP = 64 << 20
"""Bytes a step may copy out: bounds what spilling adds to the step's time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """page: tokens in an engine page. block_tokens: a multiple of it. shard_bytes: of one rank's part of a block."""

    page: int
    block_tokens: int
    shard_bytes: int
    world: int

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page


class SchedulerHalf:
    def __init__(self, shape: Shape, client: SchedulerClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._shape = shape
        self._client = client
        self._clock = clock
        self._orders = count(1)
        self._hurry = count(-1, -1)  # orders of preempted requests: the last one preempted goes first
        self._tracked: dict[str, Tracked] = {}
        self._steps = count(1)
        self._planned: dict[int, list[tuple[str, int, int]]] = {}  # step -> (request, life, tokens computed after it)
        self._loads: list[Load] = []
        self._urgent: list[Save] = []
        self._spilling: dict[str, Tracked] = {}  # with reserved blocks, or held
        self._held: set[str] = set()
        self._restarted: set[str] = set()  # since the last plan
        self._epoch = LOADED_FROM_FILES

    # a request arrives and asks ---------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        tracked = self._track(request)
        if tracked.chain is not None and not request.skip_reading_prefix_cache:
            tracked.ask = self._client.ask(tracked.chain.digests, tracked.epoch, tracked.order)

    def _track(self, request: Any) -> Tracked:
        known = self._tracked.get(request.request_id)
        if known is not None:
            return known
        chain: Chain | None = None
        reason = _foreign_input(request)
        if reason:
            self._client.count(f"bypassed_{reason}")
        else:
            chain = Chain(self._shape.block_tokens, salt_extras(request.cache_salt))
            chain.extend(request.all_token_ids[:])
        tracked = Tracked(request, next(self._orders), chain, self._epoch)
        self._tracked[request.request_id] = tracked
        return tracked

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be recalled now; None: ask again."""
        tracked = self._track(request)
        if tracked.chain is None or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.pages:
            self._restart(tracked)
        if tracked.ask is None and not tracked.asked:
            tracked.chain.extend(request.all_token_ids[tracked.chain.tokens :])
            tracked.ask = self._client.ask(tracked.chain.digests, tracked.epoch, tracked.order)
            if tracked.ask is None:
                self._client.count("missed_no_session" if tracked.chain.digests else "missed_short_prompt")
        first = not tracked.asked
        if first:
            tracked.asked, tracked.asked_at = True, self._clock()
        ask = tracked.ask
        if ask is None:
            return 0, False
        if not self._client.settle(ask, FIRST_ASK_WAIT_S if first else 0):
            return None, False
        if not ask.final:
            self._client.count("missed_too_slow")
        blocks = self._client.offer(ask)
        tracked.known = max(tracked.known, blocks)
        tracked.offered_from = computed
        tokens = min(blocks * self._shape.block_tokens, request.num_tokens) - computed
        return (tokens, True) if tokens > 0 else (0, False)

    def _restart(self, tracked: Tracked) -> None:
        """The request was preempted, or its load brought nothing: it starts again with other pages."""
        self._hurry_out(tracked)
        self._end_ask(tracked)
        self._restarted.add(tracked.request.request_id)
        tracked.pages = []
        tracked.confirmed = 0
        tracked.admitted = False
        tracked.life += 1
        tracked.asked = False
        tracked.load = None
        tracked.order = next(self._hurry)
        if tracked.mute:
            tracked.mute, tracked.known = False, 0

    def _hurry_out(self, tracked: Tracked) -> None:
        """Its pages are the engine's again: what can be saved is saved before the next forward, the rest is given up
        and will be offered anew when it has been computed again."""
        self._urgent += tracked.ready(self._shape.block_tokens, self._shape.pages_per_block)
        self._give_up(tracked)

    def _end_ask(self, tracked: Tracked) -> None:
        if tracked.ask is not None:
            self._client.release(tracked.ask)
            tracked.ask = None

    def allocated(self, request: Any, pages: Sequence[int], external: int) -> None:
        """The request has its pages; `external` tokens of them are to be recalled (0: none, or known already)."""
        tracked = self._track(request)
        tracked.pages = list(pages)
        if external == 0:
            self._end_ask(tracked)
            return
        ask = tracked.ask
        if ask is None:
            return
        bt, page = self._shape.block_tokens, self._shape.page
        start, end = tracked.offered_from, tracked.offered_from + external
        first, last = start // bt, -(-end // bt)
        transfer, refs = self._client.recall(ask, first, last - first)
        tracked.ask = None
        blocks = []
        for i, row in enumerate(refs):
            low, high = max(start, (first + i) * bt), min(end, (first + i + 1) * bt)
            ranks = [(int(r["slab"]), int(r["slot"]), int(r["generation"])) for r in row]
            blocks.append((ranks, tracked.pages[low // page : high // page]))
        tracked.load = Load(request.request_id, transfer, start % bt // page, blocks)
        tracked.load_first = first
        tracked.recalled_tokens += external
        self._loads.append(tracked.load)

    # a step is planned ------------------------------------------------------------------------------------------------

    def plan(self, out: Any) -> StepPlan:
        """The plan of this step. Called once a step, also for empty ones."""
        step = next(self._steps)
        for request_id in out.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.pages and request_id not in self._restarted:
                self._restart(tracked)
        self._restarted.clear()
        planned: list[tuple[str, int, int]] = []
        for new in out.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.pages = list(new.block_ids[0])
                self._foresee(tracked, new.req_id, new.num_computed_tokens, out, planned)
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            new_pages = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                tracked.pages = list(new_pages[0])
            elif new_pages:
                tracked.pages.extend(new_pages[0])
            self._foresee(tracked, request_id, cached.num_computed_tokens[i], out, planned)
        if planned:
            self._planned[step] = planned
        for request_id in out.finished_req_ids:
            if request_id not in self._held:
                self._forget(request_id)
        plan = StepPlan(step, self._loads, self._urgent)
        self._loads, self._urgent = [], []
        self._collect_saves(plan)
        return plan

    def _foresee(
        self, tracked: Tracked, request_id: str, computed: int, out: Any, planned: list[tuple[str, int, int]]
    ) -> None:
        """Notes what the step computes and reserves slots for the blocks that it completes."""
        chain = tracked.chain
        if chain is None:
            return
        if not tracked.admitted or computed < tracked.confirmed:
            # Admission: engine hits and what was recalled are there. Or a failed load has thrown the request back.
            tracked.admitted, tracked.confirmed = True, computed
        after = computed + out.num_scheduled_tokens[request_id]
        planned.append((request_id, tracked.life, after))
        blocks = after // self._shape.block_tokens
        if blocks <= tracked.known or tracked.mute:
            return
        if blocks > len(chain):
            chain.extend(tracked.request.all_token_ids[chain.tokens :])
            blocks = min(blocks, len(chain))  # with asynchronous scheduling the last token may not be known yet
        while tracked.known < blocks:
            first = tracked.known
            upto = min(blocks, first + MOST_RESERVED)
            parent = chain.digests[32 * (first - 1) : 32 * first] if first else b""
            spill = self._client.reserve(parent, chain.digests[32 * first : 32 * upto], tracked.epoch)
            if spill is None:
                return
            tracked.pending.append(Pending(first, spill))
            self._spilling[request_id] = tracked
            tracked.known = upto

    def _collect_saves(self, plan: StepPlan) -> None:
        room = SAVE_BYTES_PER_STEP
        now = self._clock()
        for request_id, tracked in list(self._spilling.items()):
            for save in tracked.ready(self._shape.block_tokens, self._shape.pages_per_block):
                plan.saves.append(save)
                room -= self._shape.shard_bytes
                if room <= 0:
                    return
            if request_id in self._held:
                if not tracked.pending or now - tracked.held_since > HOLD_S:
                    plan.release.append(request_id)
                    self._forget(request_id)
            elif not tracked.pending:
                del self._spilling[request_id]

    # a step has ended -------------------------------------------------------------------------------------------------

    def stepped(self, report: StepReport | None) -> None:
        """What the workers say of the steps that they ended."""
        if report is None:
            return
        for step, ranks in report.done.items():
            if ranks < self._shape.world:
                continue
            for request_id, life, after in self._planned.pop(step, ()):
                tracked = self._tracked.get(request_id)
                if tracked is not None and tracked.life == life:
                    tracked.confirmed = max(tracked.confirmed, after)
            for old in [s for s in self._planned if s < step]:
                del self._planned[old]  # its report is lost, or it raised: it confirms nothing
        for request_id, transfer, bad in report.failed:
            self._load_failed(request_id, transfer, bad)
        for request_id, transfer in report.loaded:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.load is not None and tracked.load.transfer == transfer:
                tracked.load = None
                tracked.recall_s += self._clock() - tracked.asked_at

    def _load_failed(self, request_id: str, transfer: int, bad: int) -> None:
        """The block is dropped before the scheduler asks again, or it would be offered for ever."""
        self._client.count("failed_loads")
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.chain is None or tracked.load is None or tracked.load.transfer != transfer:
            return
        block = tracked.load_first + bad
        self._client.forget(tracked.chain.digests[32 * block : 32 * block + 32], tracked.epoch)
        tracked.known = min(tracked.known, block)
        tracked.admitted = False
        tracked.recalled_tokens = 0
        tracked.load = None

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's pages must be held for its last saves, and its receipt."""
        request_id = request.request_id
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return False, None
        self._end_ask(tracked)
        receipt = {
            "stepwell": {
                "recalled_tokens": tracked.recalled_tokens,
                "tiers": {"host": tracked.recalled_tokens},
                "recall_ms": round(1e3 * tracked.recall_s, 3),
            }
        }
        if tracked.pending and tracked.pages and not tracked.load and not tracked.mute:
            tracked.held_since = self._clock()
            self._held.add(request_id)
            return True, receipt
        self._forget(request_id)
        return False, receipt

    def _forget(self, request_id: str) -> None:
        self._held.discard(request_id)
        self._spilling.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._end_ask(tracked)
            self._give_up(tracked)

    def _give_up(self, tracked: Tracked) -> None:
        """What was reserved and is not planned yet will not be copied; it may be offered anew."""
        for pending in tracked.pending:
            tracked.known = min(tracked.known, pending.first + pending.next)
            self._client.abandon(pending.spill, [n for n in pending.spill.leases[pending.next :] if n])
        tracked.pending = []

    # the rest ---------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The weights may have changed: a new epoch, in which nothing of before is ever found. Requests that live now
        spill nothing more unless they start again."""
        self._epoch = secrets.randbits(64) or 1
        for tracked in self._tracked.values():
            self._end_ask(tracked)
            self._give_up(tracked)
            tracked.mute, tracked.epoch = True, self._epoch

    def drop(self, request_id: str) -> None:
        """After an exception in a hook: this request goes on without stepwell."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and request_id not in self._held:
            self._forget(request_id)

    @property
    def busy(self) -> bool:
        """The engine must go on stepping."""
        return bool(self._held or self._loads or self._urgent)

    @property
    def tracked(self) -> int:
        return len(self._tracked)


def _foreign_input(request: Any) -> str:
    """The name of an input that shapes the KV and that the digest does not know, or ""."""
    if request.lora_request is not None:
        return "adapter"
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    return ""
