"""A block's way out of vLLM's pages: slots are reserved when the step that completes it is planned, and copies are
planned when all ranks have confirmed that step.

A request that ends gives its pages back at once. What they hold stays until they are taken for another one: its last
blocks are copied from them until then, at the latest right before that step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from stepwell.block.digest import Chain
from stepwell.client.scheduler import MAX_RESERVED, SchedulerClient
from stepwell.engines.common.canaries import STEP_BYTES, Canaries
from stepwell.engines.common.plan import Save, Shape, StepPlan
from stepwell.engines.common.requests import PendingSpill, Tracked
from stepwell.engines.common.steps import SaveRoom
from stepwell.engines.common.tasks import Handover
from stepwell.engines.vllm.scheduler.live import LiveRequests

LINGER_S = 0.1
"""Longest time that what is left of a request that has ended waits to be copied, for slots or for its turn."""


class EngineSpills:
    """`plan` is that of the next step, which gets the saves; `room` bounds their bytes."""

    def __init__(
        self,
        live: LiveRequests,
        plan: Handover[StepPlan],
        shape: Shape,
        client: SchedulerClient,
        canaries: Canaries,
    ) -> None:
        self._live = live
        self._plan = plan
        self._shape = shape
        self._client = client
        self._canaries = canaries
        self.room = SaveRoom(shape.shard_bytes / shape.block_tokens)

    def reserve(self, request_id: str, tracked: Tracked, chain: Chain, after: int) -> None:
        """Reserves slots for the blocks that a step completes, after which the request has `after` tokens."""
        if tracked.answer is not None:
            if not tracked.answer.final:
                return  # it comes within a step or two
            tracked.known = max(tracked.known, tracked.answer.blocks)
            tracked.answer = None
        blocks = after // self._shape.block_tokens
        if blocks <= tracked.known or tracked.mute:
            return
        if blocks > len(chain):
            chain.extend(tracked.request.all_token_ids[chain.tokens :])
            blocks = min(blocks, len(chain))  # with asynchronous scheduling the last token may not be known yet
        while tracked.known < blocks:
            first = tracked.known
            upto = min(blocks, first + MAX_RESERVED)
            parent = chain.digests[32 * (first - 1) : 32 * first] if first else b""
            spill = self._client.reserve(parent, chain.digests[32 * first : 32 * upto], tracked.epoch, first)
            if spill is None:
                return
            tracked.pending.append(PendingSpill(first, spill))
            self._live.spilling[request_id] = tracked
            tracked.known = upto

    def hurry_out(self, tracked: Tracked) -> None:
        """Plans saves before the next forward from pages that are the engine's again. Blocks that cannot be saved are
        given up, and offered anew when they have been computed again."""
        self._save(tracked, self._plan.now.urgent)
        self._live.give_up(tracked)

    def taken(self, fresh: Collection[int]) -> None:
        """Saves what requests that ended have left in these pages, which the engine takes now."""
        taken = frozenset(fresh) if self._live.lingering else frozenset()
        for request_id, tracked in list(self._live.lingering.items()):
            with self._live.apart(request_id):
                if not taken.isdisjoint(tracked.unsaved(self._shape.pages_per_block)):
                    self.hurry_out(tracked)
                    self._live.forget(request_id)

    def _saves(self, tracked: Tracked) -> Iterator[Save]:
        """Saves of the request that can be planned now; none if its adapter has changed since. A later change does not
        concern what was computed before."""
        if not tracked.pending or not self._live.trusted or not self._live.as_it_was(tracked):
            return iter(())
        return tracked.ready(self._shape.block_tokens, self._shape.pages_per_block)

    def _save(self, tracked: Tracked, saves: list[Save]) -> None:
        """Adds the request's saves, as many as this step may still copy."""
        for save in self._saves(tracked) if self.room.left > 0 else ():
            saves.append(save)
            self.room.spend(self._shape.shard_bytes)
            if self.room.left <= 0:
                break

    def collect(self, plan: StepPlan) -> None:
        """Adds saves and comparisons to the plan. Requests that have ended come first: their pages may be taken any
        time."""
        to_compare = STEP_BYTES
        now = self._live.clock()
        for request_id, tracked in {**self._live.lingering, **self._live.spilling}.items():
            with self._live.apart(request_id):
                self._save(tracked, plan.saves)
                if to_compare > 0 and (compare := self._canaries.ready(tracked)) is not None:
                    plan.compares.append(compare)
                    tracked.canary_lease = None
                    to_compare -= self._canaries.cost(compare)
                busy = tracked.pending or tracked.canary_lease is not None
                if request_id in self._live.lingering:
                    if not busy or now - tracked.ended_at > LINGER_S:
                        self._live.forget(request_id)
                elif not busy:
                    del self._live.spilling[request_id]

    def not_loaded(self, pages: Collection[int]) -> None:
        """Takes note of pages that could not be loaded, by whichever connector, before their step is confirmed. A
        request that was scheduled with one of them has computed on top of it, and so has one that hits such pages in
        the engine's cache, where they stay until they have been computed again: neither spills anything."""
        suspect = self._live.suspect
        try:
            suspect.update(pages)
            for tracked in self._live.known.values():
                if tracked.admitted and not suspect.isdisjoint(tracked.pages):
                    first = next(at for at, page in enumerate(tracked.pages) if page in suspect)
                    suspect.update(tracked.pages[first:])
                    self._live.mute(tracked)
        except Exception:
            self._live.trusted = False
            self._live.drop_all()
            raise
