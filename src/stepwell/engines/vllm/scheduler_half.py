"""The half of the connector that lives beside vLLM's scheduler: decides what to recall and what to spill.

A block's way out:  planned in step N -> slots reserved while N runs -> N confirmed by all ranks -> copied in step N+1
                    A request that ends gives its pages back at once. What they hold stays until they are taken for
                    another one: its last blocks are copied from them until then, at the latest right before that step
A request's way in: asked when it arrives -> offered when the scheduler asks -> loads planned at its allocation

Nothing here waits for the well, except at most a millisecond at a request's first ask. Hooks are called in any order
and number (facts are in docs/design/vllm.md); state is cleaned up by `finished_req_ids` and the worker's reports. What
goes wrong with one request costs that one its recalls and spills, and no other anything.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from stepwell.block.digest import Chain, adapter_extras, salt_extras
from stepwell.block.namespace import LOADED_FROM_FILES
from stepwell.client.scheduler import MOST_RESERVED, Ask, SchedulerClient
from stepwell.engines.common.adapters import Adapter, Adapters, Unread
from stepwell.engines.common.canaries import STEP_BYTES, Canaries
from stepwell.engines.common.counts import Tally
from stepwell.engines.common.plan import Load, Save, StepPlan, StepReport
from stepwell.engines.common.requests import Loading, Pending, Tracked
from stepwell.engines.common.room import SaveRoom
from stepwell.engines.common.shape import Shape
from stepwell.engines.common.steps import Computes, Steps, StepTimes
from stepwell.engines.common.tasks import Handover
from stepwell.engines.vllm.requests import foreign_input, recall_wish
from stepwell.engines.vllm.scheduled import computed, fresh_pages

FIRST_ASK_WAIT_S = 0.0007  # a wait ends 0.1 to 0.2 ms late (timer slack, a change of threads): 1 ms in all
LINGER_S = 0.1
"""Longest time that what is left of a request that has ended waits to be copied, for slots or for its turn."""

Trouble = Callable[[str, Exception], None]
"""Is told of an exception and where it was caught; raises nothing."""


class SchedulerHalf:
    def __init__(
        self,
        shape: Shape,
        client: SchedulerClient,
        trouble: Trouble,
        tally: Tally | None = None,
        canaries: Canaries | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        new_plan: Callable[[int], StepPlan] = StepPlan,
    ) -> None:
        self._adapters = adapters
        self._shape = shape
        self._client = client
        self._trouble = trouble
        self._tally = tally or Tally()
        self._canaries = canaries or Canaries(shape, client)
        self._clock = clock
        self._lives = count(1)
        self._orders = count(1)
        self._hurry = count(-1, -1)  # orders of preempted requests: the last one preempted goes first
        self._tracked: dict[str, Tracked] = {}
        numbers = count(1)
        self._plan: Handover[StepPlan] = Handover(lambda: new_plan(next(numbers)))  # of the next step
        self._begun = 0  # the step that was planned last
        self._steps = Steps(shape.world)
        self._times = StepTimes()
        self._spilling: dict[str, Tracked] = {}  # with reserved blocks, a canary, or lingering
        self._lingering: dict[str, Tracked] = {}  # ended, but for what is yet to be copied from pages that were theirs
        self._room = SaveRoom(shape.shard_bytes / shape.block_tokens)
        self._restarted: set[str] = set()  # since the last plan
        self._suspect: set[int] = set()  # pages that hold what failed to load, or what was computed on top of it
        self._epoch = LOADED_FROM_FILES
        self._trusted = True  # else an exception has left open what pages hold: until a reset ends well all are misses
        self._naps = 0

    # a request arrives and asks ---------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        tracked = self._track(request)
        if tracked.chain is not None and not request.skip_reading_prefix_cache:
            tracked.ask = self._ask(tracked, tracked.chain)

    def _ask(self, tracked: Tracked, chain: Chain) -> Ask | None:
        request = tracked.request
        return self._client.ask(chain.digests, tracked.epoch, tracked.order, request.num_tokens, recall_wish(request))

    def _track(self, request: Any) -> Tracked:
        known = self._tracked.get(request.request_id)
        if known is not None:
            if known.request is request:
                return known
            self._forget(request.request_id)  # its id is used again
        chain: Chain | None = None
        reason, adapter = foreign_input(request), None
        if not reason and request.lora_request is not None:
            adapter, reason = self._adapter(request.lora_request)
        if reason:
            self._client.count(f"bypassed_{reason}")
        elif self._trusted:
            extras = salt_extras(request.cache_salt) + adapter_extras(adapter.digest if adapter else None)
            chain = Chain(self._shape.block_tokens, extras)
            chain.extend(request.all_token_ids[:])
        tracked = Tracked(request, next(self._orders), chain, self._epoch, next(self._lives), adapter)
        self._tracked[request.request_id] = tracked
        return tracked

    def _adapter(self, lora_request: Any) -> tuple[Adapter | None, str]:
        """The request's adapter, or why it bypasses."""
        found = self._adapters.of(lora_request) if self._adapters is not None else None
        match found:
            case Adapter():
                return found, ""
            case Unread():
                return None, "adapter_unread"
        return None, "adapter"

    def _as_it_was(self, tracked: Tracked) -> bool:
        """The request's adapter, if it has one, is what its digest says. Else it goes on without stepwell."""
        if tracked.adapter is None or self._adapters is None or self._adapters.holds(tracked.adapter):
            return True
        self._client.count("bypassed_adapter")
        self.drop(tracked.request.request_id)
        return False

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be recalled now; None: ask again."""
        tracked = self._track(request)
        if tracked.chain is None or not self._trusted or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.pages:
            self._restart(tracked)
        if tracked.failed:
            return 0, False
        if tracked.ask is None and not tracked.asked:
            tracked.chain.extend(request.all_token_ids[tracked.chain.tokens :])
            tracked.ask = self._ask(tracked, tracked.chain)
            if tracked.ask is None:
                self._client.count("missed_no_session" if tracked.chain.digests else "missed_short_prompt")
        first = not tracked.asked
        if first and not self._as_it_was(tracked):
            return 0, False
        if first:
            tracked.asked, tracked.asked_at = True, self._clock()
        ask = tracked.ask
        if ask is None:
            return 0, False
        if computed >= len(tracked.chain) * self._shape.block_tokens:
            return 0, False  # the engine has it all: nothing to wait for
        if not self._client.settle(ask, FIRST_ASK_WAIT_S if first else 0):
            return None, False
        blocks = self._client.offer(ask)
        tracked.known = max(tracked.known, blocks)
        tracked.offered_from, tracked.offered_at = computed, self._clock()
        tokens = min(blocks * self._shape.block_tokens, request.num_tokens) - computed
        if tokens <= 0 or self._canaries.takes(tracked, computed, blocks):
            return 0, False
        return tokens, True

    def _restart(self, tracked: Tracked) -> None:
        """The request was preempted, or its load brought nothing: it starts again with other pages."""
        self._hurry_out(tracked)
        self._end_ask(tracked)
        self._restarted.add(tracked.request.request_id)
        tracked.pages = []
        tracked.confirmed = 0
        tracked.admitted = False
        tracked.life = next(self._lives)
        tracked.asked = False
        tracked.loading = None
        tracked.order = next(self._hurry)

    def _hurry_out(self, tracked: Tracked) -> None:
        """Its pages are the engine's again: what can be saved is saved before the next forward, the rest is given up
        and will be offered anew when it has been computed again."""
        self._save(tracked, self._plan.now.urgent)
        self._give_up(tracked)

    def _saves(self, tracked: Tracked) -> Iterator[Save]:
        """What of it can be saved now. What a changed adapter may have computed is given up instead; a change that
        comes later is none of what was computed before."""
        if not tracked.pending or not self._trusted or not self._as_it_was(tracked):
            return iter(())
        return tracked.ready(self._shape.block_tokens, self._shape.pages_per_block)

    def _end_ask(self, tracked: Tracked) -> None:
        for ask in (tracked.ask, tracked.answer):
            if ask is not None:
                self._client.release(ask)
        tracked.ask = tracked.answer = tracked.canary = None

    def allocated(self, request: Any, pages: Sequence[int], external: int) -> None:
        """The request has its pages; `external` tokens of them are to be recalled (0: none, or known already). If this
        raises, the caller must `refuse` them: the request is parked until its load is reported."""
        self._plan.now.fresh += pages
        tracked = self._track(request)
        tracked.pages = list(pages)
        ask = tracked.ask
        if ask is not None and ask.first_poll:  # it was waited for: the engine alone did not have it all
            if ask.final:
                self._tally.answered(ask.reason)
            else:
                self._client.count("missed_too_slow")
            if external == 0:
                tracked.wait_s += self._clock() - tracked.asked_at  # in vain
        if external == 0:
            if self._canaries.begins(tracked):
                self._spilling[request.request_id] = tracked
            elif ask is not None:
                self._client.finish(ask)
                tracked.ask, tracked.answer = None, ask
            return
        if ask is None:
            raise LookupError("tokens were allocated that nobody offered")
        bt, page = self._shape.block_tokens, self._shape.page
        start, end = tracked.offered_from, tracked.offered_from + external
        first, last = start // bt, -(-end // bt)
        staged = bytes(ask.staged[first:last])
        load = Load(request.request_id, ask.session, 0, start % bt // page, [])
        tracked.loading = Loading(load, first, start, external, last - first, staged)
        load.transfer, refs = self._client.recall(ask, first, last - first)
        tracked.ask = None
        for i, row in zip(range(first, last), refs.tolist(), strict=True):
            low, high = max(start, i * bt), min(end, (i + 1) * bt)
            load.blocks.append((row, tracked.pages[low // page : high // page]))
        if self._suspect:
            self._suspect.difference_update(tracked.pages[start // page :])
        tracked.wait_s += tracked.offered_at - tracked.asked_at
        self._plan.now.loads.append(load)

    def staged(self, request: Any, external: int) -> int:
        """Of the tokens that it was allocated pages for just now, those that came from a tier below host memory."""
        loading = self._track(request).loading
        return loading.staged_tokens(external, self._shape.block_tokens) if loading is not None else 0

    def refuse(self, request_id: str, pages: Sequence[int], external: int) -> None:
        """Lets a recall fail that could not be planned, and ends its lease. A parked request's table ends with what it
        waits for."""
        tracked = self._tracked.get(request_id)
        load = tracked.loading.load if tracked is not None and tracked.loading is not None else None
        session, transfer = (load.session, load.transfer) if load is not None else (0, 0)
        missing = list(pages)[-external // self._shape.page :]
        self._plan.now.loads.append(Load(request_id, session, transfer, 0, [([], missing)]))

    # a step is planned ------------------------------------------------------------------------------------------------

    def plan(self, out: Any) -> StepPlan:
        """The plan of this step. Called once a step, also for empty ones. If this raises, the caller must take the plan
        `as_it_is`: one that is lost would leave requests waiting for ever."""
        plan = self._plan.now
        if plan.step == self._begun:
            # The plan of the last step could not be had: it comes now, too late for copies out of its pages. Their
            # leases end with the session.
            plan.urgent, plan.saves, plan.compares = [], [], []
        self._begun = plan.step
        plan.fresh += fresh_pages(out)
        self._observe(plan.step, out)
        self._times.begin(plan.step, computed(out))
        self._yield(plan.fresh)
        self._collect(plan)
        self._client.report(idle=not self._tracked)
        return self._taken()

    def plan_as_it_is(self) -> StepPlan:
        """The plan of a step that raised while it was planned. Page tables may have got out of step with the engine's:
        all requests go on without stepwell."""
        self._plan.now.any_page = True
        self._drop_all()
        return self._taken()

    def _drop_all(self) -> None:
        for request_id in list(self._tracked):
            self.drop(request_id)

    def _taken(self) -> StepPlan:
        self._plan.now.compares += self._canaries.take_given_up()
        self._plan.now.naps = self._naps
        self._room.next_step()
        return self._plan.take()

    def _observe(self, number: int, out: Any) -> None:
        for request_id in out.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.pages and request_id not in self._restarted:
                with self._apart(request_id):
                    self._restart(tracked)
        self._restarted.clear()
        computes: list[Computes] = []
        for new in out.scheduled_new_reqs:
            if (tracked := self._tracked.get(new.req_id)) is not None:
                tracked.pages = []
            self._scheduled(new.req_id, new.block_ids, new.num_computed_tokens, out, computes)
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is not None and request_id in cached.resumed_req_ids:
                tracked.pages = []  # what comes is its whole table
            self._scheduled(request_id, cached.new_block_ids[i], cached.num_computed_tokens[i], out, computes)
        self._steps.begin(number, computes)
        for request_id in out.finished_req_ids:
            tracked = self._tracked.get(request_id)  # perhaps of a new request with this id
            if tracked is not None and request_id not in self._lingering and tracked.request.is_finished():
                with self._apart(request_id):
                    self._forget(request_id)

    @contextmanager
    def _apart(self, request_id: str) -> Iterator[None]:
        """What goes wrong in here costs this request its recalls and spills, and no other anything."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self._trouble("build_connector_meta", error)
            self.drop(request_id)

    def _scheduled(self, request_id: str, more: Any, computed: int, out: Any, computes: list[Computes]) -> None:
        """`more`: pages by KV group that are appended to the request's table, or None."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if more:
            before, hit = len(tracked.pages), -(-computed // self._shape.page)
            tracked.pages.extend(more[0])
            if self._suspect:
                self._suspect.difference_update(tracked.pages[max(before, hit) :])  # are written anew
                if before < hit and not self._suspect.isdisjoint(tracked.pages[:hit]):
                    self._mute(tracked)
        with self._apart(request_id):
            self._foresee(tracked, request_id, computed, out.num_scheduled_tokens[request_id], computes)

    def _foresee(
        self, tracked: Tracked, request_id: str, computed: int, scheduled: int, computes: list[Computes]
    ) -> None:
        """Notes what the step computes and reserves slots for the blocks that it completes."""
        chain = tracked.chain
        if chain is None:
            return
        if not tracked.admitted:
            self._admit(tracked)
        after = computed + scheduled
        computes.append(Computes(request_id, tracked.life, after, scheduled))
        if tracked.watch is not None:
            tracked.watch.covered = after >= tracked.watch.end * self._shape.block_tokens
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
            upto = min(blocks, first + MOST_RESERVED)
            parent = chain.digests[32 * (first - 1) : 32 * first] if first else b""
            spill = self._client.reserve(parent, chain.digests[32 * first : 32 * upto], tracked.epoch)
            if spill is None:
                return
            tracked.pending.append(Pending(first, spill))
            self._spilling[request_id] = tracked
            tracked.known = upto

    def _admit(self, tracked: Tracked) -> None:
        """Its first step since it (re)started. What was recalled is in its pages; engine hits may be pages that another
        request computes in this very step, so nothing is confirmed before the step is."""
        tracked.admitted, tracked.failed = True, False
        loading, tracked.loading = tracked.loading, None
        if loading is not None:
            arrived = (loading.first + loading.good) * self._shape.block_tokens - loading.start
            arrived = max(0, min(loading.tokens, arrived))
            tracked.recalled_tokens += arrived
            staged = loading.staged_tokens(arrived, self._shape.block_tokens)
            tracked.staged_tokens += staged
            self._tally.recalled({"host": arrived - staged, "disk": staged}, loading.seconds)
            tracked.recall_s += loading.seconds
            tracked.copy_s += loading.copy_s

    def _yield(self, fresh: Collection[int]) -> None:
        """The engine takes these pages: the last moment of what requests that ended have left in them."""
        taken = frozenset(fresh) if self._lingering else frozenset()
        for request_id, tracked in list(self._lingering.items()):
            with self._apart(request_id):
                if not taken.isdisjoint(tracked.unsaved(self._shape.pages_per_block)):
                    self._hurry_out(tracked)
                    self._forget(request_id)

    def _save(self, tracked: Tracked, saves: list[Save]) -> None:
        """As much as this step may still copy."""
        for save in self._saves(tracked) if self._room.left > 0 else ():
            saves.append(save)
            self._room.spend(self._shape.shard_bytes)
            if self._room.left <= 0:
                break

    def _collect(self, plan: StepPlan) -> None:
        """What ended first is copied first: its pages may be taken at any time."""
        to_compare = STEP_BYTES
        now = self._clock()
        for request_id, tracked in {**self._lingering, **self._spilling}.items():
            with self._apart(request_id):
                self._save(tracked, plan.saves)
                if to_compare > 0 and (compare := self._canaries.ready(tracked)) is not None:
                    plan.compares.append(compare)
                    tracked.watch = None
                    to_compare -= self._canaries.cost(compare)
                busy = tracked.pending or tracked.watch is not None
                if request_id in self._lingering:
                    if not busy or now - tracked.ended_at > LINGER_S:
                        self._forget(request_id)
                elif not busy:
                    del self._spilling[request_id]

    # a step has ended -------------------------------------------------------------------------------------------------

    def not_loaded(self, pages: Collection[int]) -> None:
        """These pages could not be loaded, by whichever connector, as a step's output says before it is confirmed. A
        request that was scheduled with one of them has computed on top of it, and so has one that hits such pages in
        the engine's cache, where they stay until they have been computed again: neither spills anything."""
        try:
            self._suspect.update(pages)
            for tracked in self._tracked.values():
                if tracked.admitted and not self._suspect.isdisjoint(tracked.pages):
                    first = next(at for at, page in enumerate(tracked.pages) if page in self._suspect)
                    self._suspect.update(tracked.pages[first:])
                    self._mute(tracked)
        except Exception:
            self._trusted = False
            self._drop_all()
            raise

    def _mute(self, tracked: Tracked) -> None:
        tracked.mute = True
        with self._apart(tracked.request.request_id):
            self._give_up(tracked)

    def stepped(self, report: StepReport) -> None:
        """What the workers say of the steps that they ended, all ranks together or one after the other."""
        if report.naps > self._naps:
            self._give_up_all()
            self._naps = report.naps  # plans that do not know of it save nothing, until all is given up
        for request_id, transfer, bad in report.failed:
            with self._apart(request_id):
                self._load_failed(request_id, transfer, bad)
        for request_id, life, after, tokens in self._steps.ended(report.done):
            self._room.computed(tokens)
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.life == life:
                tracked.confirmed = max(tracked.confirmed, after)
        for rank, transfer, errors in report.compared:
            self._canaries.compared(rank, transfer, errors)
        self._tally.copied(report)
        self._client.timed(self._times.ended(report.seconds), self._copies(report))
        for request_id, transfer, copy_s in report.loaded:
            loading = self._loading(request_id, transfer)
            if loading is not None:
                loading.seconds = self._clock() - self._tracked[request_id].asked_at
                loading.copy_s = max(loading.copy_s, copy_s)

    def _copies(self, report: StepReport) -> Iterator[tuple[int, float]]:
        """Bytes of the blocks, and seconds that a rank took for its part."""
        for request_id, transfer, copy_s in report.loaded:
            loading = self._loading(request_id, transfer)
            if loading is not None:
                yield len(loading.load.blocks) * self._shape.block_bytes, copy_s

    def _loading(self, request_id: str, transfer: int) -> Loading | None:
        tracked = self._tracked.get(request_id)
        loading = tracked.loading if tracked is not None else None
        return loading if loading is not None and loading.load.transfer == transfer else None

    def _load_failed(self, request_id: str, transfer: int, bad: int) -> None:
        """The block is dropped before anybody asks again, or it would be offered for ever."""
        self._client.count("failed_loads")
        loading = self._loading(request_id, transfer)
        if loading is None:
            return
        tracked = self._tracked[request_id]
        tracked.failed = True
        loading.good = min(loading.good, bad)
        block = loading.first + bad
        tracked.known = min(tracked.known, block)
        if tracked.chain is not None:
            digest = tracked.chain.digests[32 * block : 32 * block + 32]
            self._client.forget(loading.load.session, digest, tracked.epoch)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request's receipt. Its pages are the engine's again: holding them for its last saves would keep running
        requests from them, and the engine from a reset of its caches, which may come before any other step."""
        request_id = request.request_id
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        self._end_ask(tracked)
        receipt = {"stepwell": tracked.receipt(self._shape.token_bytes)}
        covered = tracked.watch is not None and tracked.watch.covered
        if (tracked.pending or covered) and tracked.pages and tracked.loading is None:
            tracked.ended_at = self._clock()
            self._lingering[request_id] = tracked
        else:
            self._forget(request_id)
        return receipt

    def _forget(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._end_ask(tracked)
            self._give_up(tracked)
        self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        for known in (self._tracked, self._spilling, self._lingering):
            known.pop(request_id, None)

    def _forget_lingering(self) -> None:
        for request_id in list(self._lingering):
            with self._apart(request_id):
                self._forget(request_id)

    def _give_up(self, tracked: Tracked) -> None:
        """What was reserved and is not planned yet will not be copied; it may be offered anew. A canary is one less."""
        self._canaries.give_up(tracked)
        for pending in tracked.pending:
            tracked.known = min(tracked.known, pending.first + pending.next)
            self._client.abandon(pending.spill, pending.next)
        tracked.pending = []

    # the rest ---------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The weights may have changed: a new epoch, in which nothing of before is ever found. Requests that have KV
        now spill nothing more; those that the engine has just preempted for this, or not started, have none. Where this
        raises nothing is recalled or spilled until it was called again, and has ended well."""
        self._trusted = False
        self._epoch = secrets.randbits(64) or 1
        for tracked in self._tracked.values():
            tracked.epoch = self._epoch
            tracked.mute = tracked.mute or tracked.request.num_computed_tokens > 0
        self._canaries.reset()
        self._forget_lingering()
        for request_id, tracked in list(self._tracked.items()):
            with self._apart(request_id):
                self._end_ask(tracked)
                self._give_up(tracked)
            tracked.known = 0
        self._trusted = True

    def _give_up_all(self) -> None:
        """The engine has slept: what its pages held is gone, whatever it has told of that. Requests that have started
        again since are confirmed by steps that end after this."""
        self._forget_lingering()
        for request_id, tracked in list(self._tracked.items()):
            if tracked.confirmed:
                tracked.mute = True
                with self._apart(request_id):
                    self._give_up(tracked)

    def drop(self, request_id: str) -> None:
        """After an exception: this request goes on without stepwell, and is forgotten if it has ended. Raises
        nothing."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.chain = None
        with suppress(Exception):  # the client may be what raised: then its session cleans up
            self._end_ask(tracked)
        with suppress(Exception):
            self._give_up(tracked)
        tracked.pending = []
        with suppress(Exception):
            if tracked.request.is_finished():
                self._remove(request_id)

    @property
    def busy(self) -> bool:
        """The engine must go on stepping."""
        plan = self._plan.now
        return bool(self._lingering or plan.loads or plan.urgent or self._canaries.waits)

    @property
    def tracked(self) -> int:
        return len(self._tracked)
