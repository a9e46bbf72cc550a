"""A block's way out of vLLM's pages: slots are reserved when the step that completes it is planned, and copies are
planned when all ranks have confirmed that step.

A request that ends gives its pages back at once. What they hold stays until they are taken for another one: its last
blocks are copied from them until then, at the latest right before that step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from stepwell.block.digest import Chain
from stepwell.block.groups import GroupKind
from stepwell.client.scheduler import MAX_RESERVED, SchedulerClient
from stepwell.engines.common.canaries import STEP_BYTES, Canaries
from stepwell.engines.common.plan import Save, Shape, StepPlan
from stepwell.engines.common.requests import PendingSpill, Place, Tracked
from stepwell.engines.common.steps import SaveRoom
from stepwell.engines.common.tasks import Handover
from stepwell.engines.vllm.scheduler.live import LiveRequests
from stepwell.engines.vllm.scheduler.tails import prefix_digests, tail_digests, wanted_tail

LINGER_S = 0.1
"""Longest time that what is left of a request that has ended waits to be copied, for slots or for its turn."""


class EngineSpills:
    """`plan` is that of the next step, which gets the saves; `room` bounds their bytes. `zeroed_first`: the engine
    zeroes the pages that a step takes before it says so."""

    def __init__(
        self,
        live: LiveRequests,
        plan: Handover[StepPlan],
        shape: Shape,
        client: SchedulerClient,
        canaries: Canaries,
        *,
        zeroed_first: bool = False,
    ) -> None:
        self._live = live
        self._plan = plan
        self._shape = shape
        self._client = client
        self._canaries = canaries
        self._zeroed_first = zeroed_first
        self.room = SaveRoom(shape.shard_bytes * len(shape.parts) / shape.block_tokens)

    def reserve(self, request_id: str, tracked: Tracked, chain: Chain, computed: int, after: int) -> None:
        """Reserves slots for the blocks that a step completes, before which the request has `computed` tokens in its
        pages, and after which `after` that are known."""
        if tracked.answer is not None:
            if not tracked.answer.final:
                return  # it comes within a step or two
            tracked.known = max(tracked.known, tracked.answer.blocks)
            tracked.answer = None
        blocks = after // self._shape.block_tokens
        if tracked.mute:
            return
        if blocks > len(chain):
            chain.extend(tracked.request.all_token_ids[chain.tokens :])
            blocks = min(blocks, len(chain))  # with asynchronous scheduling the last token may not be known yet
        stored = blocks * len(self._shape.prefix)
        while tracked.known < stored:
            first = tracked.known
            upto = min(stored, first + MAX_RESERVED)
            parent = prefix_digests(chain, self._shape, first - 1, first) if first else b""
            digests = prefix_digests(chain, self._shape, first, upto)
            places = self._shape.places(first, upto)
            spill = self._client.reserve(parent, digests, tracked.epoch, first)
            if spill is None:
                return
            tracked.pending.append(PendingSpill(first, places, spill))
            self._live.spilling[request_id] = tracked
            tracked.known = upto
        if self._shape.tail and blocks > tracked.tail_known:
            self._reserve_tail(request_id, tracked, chain, computed, blocks)

    def _reserve_tail(self, request_id: str, tracked: Tracked, chain: Chain, computed: int, blocks: int) -> None:
        """The same for what its tail has up to this number of blocks, and the engine has not taken back."""
        wanted = wanted_tail(tracked, self._shape, tracked.tail_known, blocks)
        places = [place for place in wanted if self._is_held(tracked, place, computed)]
        for at in range(0, len(places), MAX_RESERVED):
            some = places[at : at + MAX_RESERVED]
            depth = some[0][0] * len(self._shape.prefix)
            spill = self._client.reserve(b"", tail_digests(chain, some), tracked.epoch, depth=depth)
            if spill is None:
                return
            tracked.pending.append(PendingSpill(-1, some, spill))
            self._live.spilling[request_id] = tracked
            tracked.tail_known = some[-1][0] + 1
        tracked.tail_known = blocks

    def _is_held(self, tracked: Tracked, place: Place, computed: int) -> bool:
        """The engine has not taken these pages back: it does so when none of their tokens is needed behind those that
        are computed. A state is the block's where a step ends with the block: this one or the last, of which an engine
        that schedules ahead did not know all tokens. Later the engine goes on from a copy of it."""
        (block, part), bt = place, self._shape.block_tokens
        rule = self._shape.rules[part.group]
        if rule.kind is GroupKind.STATE:
            held = (block + 1) * bt in tracked.ends
        else:
            held = part.span(block, bt)[0] // part.page >= rule.first_needed(computed) // part.page
        return held and 0 not in tracked.pages(place, self._shape)

    def hurry_out(self, tracked: Tracked) -> None:
        """Plans saves before the next forward from pages that are the engine's again, if they hold anything then.
        Blocks that cannot be saved are given up, and offered anew when they have been computed again."""
        if not self._zeroed_first:
            self._save(tracked, self._plan.now.urgent)
        self._live.give_up(tracked)

    def taken(self, fresh: Collection[int]) -> None:
        """Saves what requests that ended have left in these pages, which the engine takes now."""
        taken = frozenset(fresh) if self._live.lingering else frozenset()
        for request_id, tracked in list(self._live.lingering.items()):
            with self._live.apart(request_id):
                if not taken.isdisjoint(tracked.unsaved(self._shape)):
                    self.hurry_out(tracked)
                    self._live.forget(request_id)

    def overtaken(self, fresh: Collection[int]) -> None:
        """Saves what windows have moved beyond, of requests that go on, in these pages: the engine takes them now for
        other tokens."""
        if not self._shape.tail:
            return
        taken = frozenset(fresh)
        for request_id, tracked in list(self._live.spilling.items()):
            tails = (place for pending in tracked.pending if pending.first < 0 for place in pending.left)
            with self._live.apart(request_id):
                if any(not taken.isdisjoint(tracked.pages(place, self._shape)) for place in tails):
                    self.hurry_out(tracked)

    def _saves(self, tracked: Tracked) -> Iterator[Save]:
        """Saves of the request that can be planned now; none if its adapter has changed since. A later change does not
        concern what was computed before."""
        if not tracked.pending or not self._live.trusted or not self._live.as_it_was(tracked):
            return iter(())
        return tracked.ready(self._shape)

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
                pages = tracked.tables[0] if tracked.tables else []  # of several groups vLLM names none
                if tracked.admitted and not suspect.isdisjoint(pages):
                    first = next(at for at, page in enumerate(pages) if page in suspect)
                    suspect.update(pages[first:])
                    self._live.mute(tracked)
        except Exception:
            self._live.trusted = False
            self._live.drop_all()
            raise
