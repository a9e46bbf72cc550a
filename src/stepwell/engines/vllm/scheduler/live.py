"""Requests that are live in vLLM's scheduler: how each begins, starts again and ends, and what is given up then.

State is cleaned up by `finished_req_ids` and the worker's reports, not by the order or number of hooks. What goes wrong
with one request costs that one its recalls and spills, and no other anything.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from stepwell.block.digest import Chain, adapter_extras, salt_extras
from stepwell.block.namespace import LOADED_FROM_FILES
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.adapters import Adapter, Adapters, Unread
from stepwell.engines.common.canaries import Canaries
from stepwell.engines.common.plan import Shape
from stepwell.engines.common.requests import Tracked
from stepwell.engines.vllm.scheduler.requests import foreign_input, recall_wish
from stepwell.engines.vllm.scheduler.tails import end_search, prefix_digests

Trouble = Callable[[str, Exception], None]
"""Takes the name of the hook that caught an exception, and the exception; raises nothing."""


class LiveRequests:
    """`known` holds all of them, by id; `spilling` those with reserved blocks or a canary, `lingering` those that have
    ended, but for what is yet to be copied from pages that were theirs. `suspect` are pages that hold what failed to
    load, or what was computed on top of it. Without `trusted` an exception has left open what pages hold: until a reset
    ends well all are misses."""

    def __init__(
        self,
        shape: Shape,
        client: SchedulerClient,
        trouble: Trouble,
        canaries: Canaries,
        adapters: Adapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.adapters = adapters
        self.clock = clock
        self._shape = shape
        self._client = client
        self._trouble = trouble
        self._canaries = canaries
        self._lives = count(1)
        self._orders = count(1)
        self._hurry = count(-1, -1)  # orders of preempted requests: the last one preempted goes first
        self.known: dict[str, Tracked] = {}
        self.spilling: dict[str, Tracked] = {}
        self.lingering: dict[str, Tracked] = {}
        self.suspect: set[int] = set()
        self.epoch = LOADED_FROM_FILES
        self.trusted = True

    # beginnings -------------------------------------------------------------------------------------------------------

    def track(self, request: Any) -> Tracked:
        known = self.known.get(request.request_id)
        if known is not None:
            if known.request is request:
                return known
            self.forget(request.request_id)  # its id is used again
        chain: Chain | None = None
        reason, adapter = foreign_input(request), None
        if not reason and request.lora_request is not None:
            adapter, reason = self._adapter(request.lora_request)
        if reason:
            self._client.count(f"bypassed_{reason}")
        elif self.trusted:
            extras = salt_extras(request.cache_salt) + adapter_extras(adapter.digest if adapter else None)
            chain = Chain(self._shape.block_tokens, extras)
            chain.extend(request.all_token_ids[:])
        tracked = Tracked(request, next(self._orders), chain, self.epoch, next(self._lives), adapter)
        self.known[request.request_id] = tracked
        return tracked

    def _adapter(self, lora_request: Any) -> tuple[Adapter | None, str]:
        """The request's adapter, or why it bypasses."""
        found = self.adapters.of(lora_request) if self.adapters is not None else None
        match found:
            case Adapter():
                return found, ""
            case Unread():
                return None, "adapter_unread"
        return None, "adapter"

    def as_it_was(self, tracked: Tracked) -> bool:
        """Whether the request's adapter, if it has one, is still the one of its digest. If not, the request goes on
        without stepwell."""
        if tracked.adapter is None or self.adapters is None or self.adapters.holds(tracked.adapter):
            return True
        self._client.count("bypassed_adapter")
        self.drop(tracked.request.request_id)
        return False

    def ask(self, tracked: Tracked, chain: Chain) -> PrefixQuestion | None:
        """Posts the question for its whole chain."""
        request = tracked.request
        digests = prefix_digests(chain, self._shape, 0, len(chain) * len(self._shape.prefix))
        return self._client.ask(digests, tracked.epoch, tracked.order, request.num_tokens, recall_wish(request))

    def end_ask(self, tracked: Tracked) -> None:
        for ask in (tracked.ask, tracked.answer):
            if ask is not None:
                self._client.release(ask)
        end_search(self._client, tracked)
        tracked.ask = tracked.answer = tracked.canary = None
        tracked.streams = False

    def begin_again(self, tracked: Tracked) -> None:
        """Resets a request that was preempted, or whose load brought nothing: it starts with other pages, before those
        that wait."""
        tracked.tables, tracked.ends = [], (0, 0)
        tracked.tail_known = 0  # what it computes anew may lie elsewhere in its prompt
        tracked.confirmed = 0
        tracked.admitted = False
        tracked.life = next(self._lives)
        tracked.asked = False
        tracked.loading = None
        tracked.order = next(self._hurry)

    # what goes wrong --------------------------------------------------------------------------------------------------

    @contextmanager
    def apart(self, request_id: str) -> Iterator[None]:
        """Catches exceptions of the block: they cost this request its recalls and spills, and no other request
        anything."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self._trouble("build_connector_meta", error)
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Leaves the request without stepwell, after an exception; forgets it if it has ended. Raises nothing."""
        tracked = self.known.get(request_id)
        if tracked is None:
            return
        tracked.chain = None
        with suppress(Exception):  # the client may be what raised: then its session cleans up
            self.end_ask(tracked)
        with suppress(Exception):
            self.give_up(tracked)
        tracked.pending = []
        with suppress(Exception):
            if tracked.request.is_finished():
                self._remove(request_id)

    def drop_all(self) -> None:
        for request_id in list(self.known):
            self.drop(request_id)

    # ends -------------------------------------------------------------------------------------------------------------

    def mute(self, tracked: Tracked) -> None:
        """Lets the request spill nothing any more."""
        tracked.mute = True
        with self.apart(tracked.request.request_id):
            self.give_up(tracked)

    def give_up(self, tracked: Tracked) -> None:
        """Gives up blocks that are reserved and not planned yet, which may be offered anew, and the request's
        canary."""
        self._canaries.give_up(tracked)
        for pending in tracked.pending:
            tracked.give_back(pending, pending.next)
            self._client.abandon(pending.spill, pending.next)
        tracked.pending = []

    def ended(self, request: Any) -> dict[str, Any] | None:
        """The request's receipt. Its pages are the engine's again: holding them for its last saves would keep running
        requests from them, and the engine from a reset of its caches, which may come before any other step."""
        request_id = request.request_id
        tracked = self.known.get(request_id)
        if tracked is None:
            return None
        self.end_ask(tracked)
        receipt = {"stepwell": tracked.receipt(self._shape.token_bytes)}
        covered = tracked.canary_lease is not None and tracked.canary_lease.covered
        if (tracked.pending or covered) and tracked.tables and tracked.loading is None:
            tracked.ended_at = self.clock()
            self.lingering[request_id] = tracked
        else:
            self.forget(request_id)
        return receipt

    def forget(self, request_id: str) -> None:
        tracked = self.known.get(request_id)
        if tracked is not None:
            self.end_ask(tracked)
            self.give_up(tracked)
        self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        for known in (self.known, self.spilling, self.lingering):
            known.pop(request_id, None)

    def _forget_lingering(self) -> None:
        for request_id in list(self.lingering):
            with self.apart(request_id):
                self.forget(request_id)

    # ends of all ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The weights may have changed: a new epoch, in which nothing of before is ever found. Requests that have KV
        now spill nothing more; those that the engine has just preempted for this, or not started, have none. Where this
        raises nothing is recalled or spilled until it was called again, and has ended well."""
        self.trusted = False
        self.epoch = secrets.randbits(64) or 1
        for tracked in self.known.values():
            tracked.epoch = self.epoch
            tracked.mute = tracked.mute or tracked.request.num_computed_tokens > 0
        self._canaries.reset()
        self._forget_lingering()
        for request_id, tracked in list(self.known.items()):
            with self.apart(request_id):
                self.end_ask(tracked)
                self.give_up(tracked)
            tracked.known = tracked.tail_known = tracked.parting = 0
        self.trusted = True

    def slept(self) -> None:
        """Lets requests whose pages lost their content while the engine slept spill nothing more. Requests that have
        started again since are confirmed by steps that end after this."""
        self._forget_lingering()
        for request_id, tracked in list(self.known.items()):
            if tracked.confirmed:
                tracked.mute = True
                with self.apart(request_id):
                    self.give_up(tracked)
