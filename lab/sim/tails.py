"""Engines of a model with several cache groups: what they ask for, recall and spill, block by block in parts.

The connector's own search finds the place where a request can go on, by the real client and rules: a look says which
tails are there, then one of them is asked for beside the prefix, and both are recalled whole. The oracle names a part
by its block, group and number, and knows nothing of the digests that the connector makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lab.sim.engine import Copy, Engine, Phase, Request, Tail, names_of
from lab.sim.limits import NOTHING_SEEN_S
from lab.sim.oracle import Violation
from lab.sim.setup import BLOCK_TOKENS, Model
from stepwell.block.digest import Chain
from stepwell.client.questions import BlocksQuestion, PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.requests import Place, Tracked
from stepwell.engines.vllm.scheduler.tails import (
    TailSearches,
    end_search,
    prefix_digests,
    tail_digests,
    wanted_tail,
)

if TYPE_CHECKING:
    from lab.sim.world import World

TAKEN_BACK, COMPUTED, PARTED = 0.1, 0.2, 0.3
"""How often the engine has a page no more that could be spilled, has the beginning of a prompt itself, and stores what
is needed where prompts have parted."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    num_tokens: int
    num_prompt_tokens: int


class _Watched(SchedulerClient):
    """The engine's scheduler client, for what is asked beside the prefix: how long the request waits for that is judged
    as any other wait. Nothing else happens meanwhile, so it waits at no call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(
        self, digests: bytes, epoch: int, order: int, tokens: int = 0, recall: str = "", prefix: int = 0
    ) -> PrefixQuestion | None:
        ask = self._engine.scheduler.ask(digests, epoch, order, tokens, recall, prefix)
        self._engine.queue.entered(ask)
        return ask

    def look(self, digests: bytes, epoch: int) -> BlocksQuestion | None:
        return self._engine.scheduler.look(digests, epoch)

    def forget_look(self, look: BlocksQuestion) -> None:
        self._engine.scheduler.forget_look(look)

    def settle(self, ask: PrefixQuestion, wait_s: float) -> bool:
        now = self._engine.now()
        self._engine.queue.polled(ask, now)
        over = self._engine.scheduler.settle(ask, 0)
        if not over:
            self._engine.queue.still_in_time(ask, now)
        return over

    def offer(self, ask: PrefixQuestion, *, streamed: bool = False) -> int:
        self._engine.queue.offered(ask, self._engine.now(), streams=False)
        return self._engine.scheduler.offer(ask)

    def release(self, ask: PrefixQuestion) -> None:
        self._engine.queue.left(ask, self._engine.now())
        self._engine.scheduler.release(ask)


class Tails:
    def __init__(self, world: World) -> None:
        self._world = world

    # requests ---------------------------------------------------------------------------------------------------------

    def ask(self, engine: Engine, digests: bytes, epoch: int, order: int) -> Request:
        world, shape, chain = self._world, engine.model.shape, _chain(digests)
        whims = world.dice if world.whims else None
        rest = whims.randrange(BLOCK_TOKENS) if whims else 1  # of 0 the last block has to be computed
        computed = whims.randrange(len(chain)) * BLOCK_TOKENS if whims and whims.random() < COMPUTED else 0
        tokens = len(chain) * BLOCK_TOKENS + rest
        tracked = Tracked(_Prompt(tokens, tokens), order, chain, epoch, 0)
        blocks = len(chain) * len(shape.prefix)
        stored, names = prefix_digests(chain, shape, 0, blocks), _names(chain, shape.places(0, blocks))
        ask = engine.scheduler.ask(stored, epoch, order)
        request = Request(world.requests, world.trace.events, epoch, stored, names, ask)
        engine.requests.append(request)
        engine.queue.entered(ask)
        tracked.ask, search = ask, self._searches(engine).begin(tracked, chain)
        tracked.search = search
        request.tail = Tail(tracked, chain, search, computed)
        world.seen["looks"] += search.look is not None
        return request

    def poll(self, engine: Engine, request: Request, tail: Tail, ask: PrefixQuestion) -> None:
        """The engine's scheduler comes to this request."""
        world, shape, now = self._world, engine.model.shape, self._world.clock.now()
        if not engine.scheduler.settle(ask, 0):
            engine.queue.still_in_time(ask, now)
            return
        reach, before = ask.blocks // len(shape.prefix), tail.search.tries
        if tail.computed and world.whims and world.dice.random() < 0.05:
            tail.computed -= BLOCK_TOKENS  # the engine has taken a page of its own back
        known = self._searches(engine).advance(tail.tracked, tail.chain, tail.search, reach, tail.computed)
        world.seen["another place was tried"] += tail.search.tries > max(1, before)
        self._judge(engine, request, tail)
        if not known:
            if tail.search.here is None and now - tail.search.since >= NOTHING_SEEN_S:
                raise Violation("late", f"request {request.number}: a look is unanswered for {NOTHING_SEEN_S:g} s")
            return
        blocks = engine.scheduler.offer(ask)
        if not (blocks or ask.settled):
            return  # it has given way to another request in this moment
        engine.queue.offered(ask, now, streams=False)
        found = tail.search.blocks if tail.search.ask is None or tail.search.ask.session == ask.session else 0
        tail.blocks = min(blocks // len(shape.prefix), found)
        if tail.blocks * BLOCK_TOKENS > tail.computed:
            request.phase = Phase.OFFERED
            return
        engine.queue.left(ask, now)
        engine.scheduler.release(ask)
        self.end(engine, request)
        world.finish(engine, request, "no_window" if blocks else ask.reason)

    def _judge(self, engine: Engine, request: Request, tail: Tail) -> None:
        """What a look has said, when it is known."""
        if tail.search.here is not None and not tail.judged:
            tail.judged = True
            places = [place for place in tail.search.looked if place in tail.search.here]
            for name in _names(tail.chain, places):
                self._world.oracle.judge_look(engine.identity(request.epoch, name), request.asked)
            self._world.seen["seen to be there"] += len(places)

    def recall(self, engine: Engine, request: Request, tail: Tail, ask: PrefixQuestion) -> None:
        """The engine has pages for all that it needs, and recalls it: the prefix, and what goes with its end."""
        world, parts, places = self._world, len(engine.model.shape.prefix), tail.search.places
        request.first, last = tail.computed // BLOCK_TOKENS * parts, tail.blocks * parts
        transfer, refs = engine.scheduler.recall(ask, request.first, last - request.first)
        engine.queue.left(ask, world.clock.now())
        transfers = [transfer]
        if tail.search.ask is not None:
            also, more = engine.scheduler.recall(tail.search.ask, 0, len(places))
            engine.queue.left(tail.search.ask, world.clock.now())
            transfers.append(also)
            refs = np.concatenate([refs, more])
            request.digests = request.digests[: 32 * last] + tail_digests(tail.chain, places)
            request.names = request.names[:last] + _names(tail.chain, places)
            world.seen["recalled with a tail"] += 1
        self.end(engine, request)
        if len(refs) < last - request.first + len(places):
            raise Violation("wrong", f"request {request.number} goes on without all that it needs")
        request.offered, request.good = request.first + len(refs), len(refs)
        request.phase, request.missing = Phase.COPYING, set(range(engine.model.world))
        for rank, each in enumerate(engine.workers):
            shard = rank // engine.model.replicas
            copy = Copy(each, rank, shard, ask.session, refs[:, shard], [], [], request, list(transfers))
            each.copies.append(copy)

    def ask_part(self, engine: Engine, digest: bytes, name: bytes, epoch: int) -> Request:
        """Asks for one part, alone."""
        self._world.requests += 1
        ask = engine.scheduler.ask(digest, epoch, 0, 0, "always")
        request = Request(self._world.requests, self._world.trace.events, epoch, digest, [name], ask)
        engine.requests.append(request)
        engine.queue.entered(ask)
        return request

    def end(self, engine: Engine, request: Request) -> None:
        """The request has no need of its search any more. Idempotent."""
        if request.tail is not None:
            end_search(_Watched(engine), request.tail.tracked)

    def _searches(self, engine: Engine) -> TailSearches:
        return TailSearches(engine.model.shape, _Watched(engine), self._world.clock.now)

    # spills -----------------------------------------------------------------------------------------------------------

    def spill(self, engine: Engine, digests: bytes, epoch: int, first: int) -> None:
        """Blocks of a prompt and an answer from the one of this number on: all of their prefix, and of their tail what
        is worth it and not the engine's again."""
        world, shape, chain = self._world, engine.model.shape, _chain(digests)
        blocks, whims = len(chain), world.dice if world.whims else None
        prompt = whims.randint(1, blocks) if whims else blocks
        tracked = Tracked(_Prompt(0, prompt * BLOCK_TOKENS + 1), 0, chain, epoch, 0)
        if whims and whims.random() < PARTED:
            tracked.parting = whims.randint(1, blocks)
        parts, parent = len(shape.prefix), b""
        if first:
            parent = prefix_digests(chain, shape, first * parts - 1, first * parts)
        stored = prefix_digests(chain, shape, first * parts, blocks * parts)
        places = shape.places(first * parts, blocks * parts)
        world.reserve(engine, parent, stored, epoch, first * parts, _names(chain, places))
        tail = wanted_tail(tracked, shape, first, blocks)
        tail = [place for place in tail if not (whims and whims.random() < TAKEN_BACK)]
        if tail:
            world.reserve(engine, b"", tail_digests(chain, tail), epoch, -1, _names(chain, tail), tail[0][0] * parts)


def parts(model: Model, digests: bytes) -> tuple[bytes, list[bytes]]:
    """All parts of these blocks, those of the tail last: their digests, and the oracle's names for them."""
    if not model.groups:
        return digests, names_of(digests)
    chain, shape = _chain(digests), model.shape
    blocks = len(chain) * len(shape.prefix)
    tail = [(block, part) for block in range(len(chain)) for part in shape.tail]
    stored = prefix_digests(chain, shape, 0, blocks) + tail_digests(chain, tail)
    return stored, _names(chain, [*shape.places(0, blocks), *tail])


def _chain(digests: bytes) -> Chain:
    chain = Chain(BLOCK_TOKENS)
    chain.digests = digests
    return chain


def _names(chain: Chain, places: Sequence[Place]) -> list[bytes]:
    """Of parts, by what they are parts of."""
    return [chain.digests[32 * block : 32 * block + 32] + bytes([part.group, part.number]) for block, part in places]
