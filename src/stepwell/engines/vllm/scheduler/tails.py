"""The tail of a request: what its groups with windows keep near the places only where a request may go on.

Such a place is the end of a prompt, any block of an answer, and the end of a prefix that other prompts have had too:
the first prompt that parts there is computed from an earlier place, and leaves the tail behind for the next one.

    which places have a tail? -> the last one that the prefix reaches -> its tail is asked for, pinned and offered

Where a place turns out not to have all of its tail, the one before it is tried. Nothing here waits for the well, except
at most a millisecond for each place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from stepwell.block.digest import Chain
from stepwell.block.groups import longest, needed
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.plan import Shape
from stepwell.engines.common.requests import Place, TailSearch, Tracked
from stepwell.protocol.messages import NoPlace

MAX_PLACES = 1024
"""Blocks at the end of a prefix that are looked at for a place with a tail."""

LOOK_S = 0.15
"""Longest wait for the answer that says which places have a tail, from when the prefix is known; then none has."""

FIRST_WAIT_S = 0.0007
"""Longest wait for a tail that lies in host memory, once for each place that is asked for: a step of an engine may take
much longer than the well, and passes before it is looked at again."""

MAX_TRIES = 4
"""Places that are asked for, for one request."""

MAX_TOLD = 64
"""Places at the end of a prefix of which the well is told what is missing there."""


def prefix_digests(chain: Chain, shape: Shape, first: int, end: int) -> bytes:
    """Digests of the stored blocks [first, end) of a prefix. Those of the first part are the chain's own."""
    if len(shape.prefix) == 1:
        return chain.digests[32 * first : 32 * end]
    return b"".join(digest_of(chain, shape.place(number), shape) for number in range(first, end))


def digest_of(chain: Chain, place: Place, shape: Shape) -> bytes:
    block, part = place
    digest = chain.digests[32 * block : 32 * block + 32]
    return digest if part == shape.prefix[0] else part.digest(digest)


def tail_digests(chain: Chain, places: Sequence[Place]) -> bytes:
    return b"".join(part.digest(chain.digests[32 * block : 32 * block + 32]) for block, part in places)


def last_place(tracked: Tracked, shape: Shape) -> int:
    """The number of blocks behind which the request can go on at most: one of its tokens has to be computed."""
    return (tracked.request.num_tokens - 1) // shape.block_tokens


def wanted_tail(tracked: Tracked, shape: Shape, first: int, end: int) -> list[Place]:
    """Parts of the tail that are worth storing, of blocks [first, end)."""
    prompt = (tracked.request.num_prompt_tokens - 1) // shape.block_tokens
    wanted = set(_needed(shape, prompt))
    wanted.update(_needed(shape, tracked.parting))
    return [
        (block, part)
        for block in range(first, end)
        for part in shape.tail
        if block >= prompt or (block, part) in wanted
    ]


def _needed(shape: Shape, blocks: int) -> list[Place]:
    """The tail of a request that goes on behind its first `blocks` blocks."""
    return needed(shape.rules, shape.tail, shape.block_tokens, blocks, shape.recomputed)


class TailSearches:
    def __init__(self, shape: Shape, client: SchedulerClient, clock: Callable[[], float]) -> None:
        self._shape = shape
        self._client = client
        self._clock = clock
        # Parts with the same rule are stored together: the last of them tells of all.
        self._telling = tuple({shape.rules[part.group]: part for part in shape.tail}.values())

    def begin(self, tracked: Tracked, chain: Chain) -> TailSearch:
        """Asks which places have a tail, unless it depends on the prefix's reach which ones are to be looked at."""
        search = TailSearch()
        if (end := min(len(chain), last_place(tracked, self._shape))) <= MAX_PLACES:
            self._look(tracked, chain, search, end)
        return search

    def _look(self, tracked: Tracked, chain: Chain, search: TailSearch, end: int) -> None:
        first = max(0, end - MAX_PLACES)
        search.looked = [(block, part) for block in range(first, end) for part in self._telling]
        search.look = self._client.look(tail_digests(chain, search.looked), tracked.epoch)

    def advance(self, tracked: Tracked, chain: Chain, search: TailSearch, reach: int, computed: int) -> bool:
        """Whether it is known by now behind how many blocks, of the first `reach`, the request can go on: farther than
        its `computed` tokens, or `search.blocks` is 0. Either number may be another one than at the last call: the
        engine has taken pages of its own cache back, the prefix has given way and is shorter now."""
        if search.here is None and not self._looked(tracked, chain, search, reach):
            return False
        if search.reach != reach or computed < search.computed:
            if search.ask is not None:
                self._client.release(search.ask)
            search.ask, search.places, search.blocks, search.tries = None, [], -1, 0
            search.reach, search.tried = reach, min(reach, last_place(tracked, self._shape)) + 1
        while search.blocks < 0:
            if search.ask is not None:
                if not self._client.settle(search.ask, FIRST_WAIT_S):
                    return False
                if self._client.offer(search.ask) >= len(search.places):
                    search.blocks = search.tried
                    break
                self._client.release(search.ask)
                search.ask, search.places = None, []
            self._try_next(tracked, chain, search, computed)
        return True

    def _looked(self, tracked: Tracked, chain: Chain, search: TailSearch, reach: int) -> bool:
        """It is known which places have a tail."""
        search.since = search.since or self._clock()
        if not search.looked:
            self._look(tracked, chain, search, min(reach, last_place(tracked, self._shape)))
        here = search.look.here if search.look is not None else b""
        if here is None and self._clock() - search.since < LOOK_S:
            return False
        search.here = frozenset(place for place, is_here in zip(search.looked, here or b"", strict=False) if is_here)
        return True

    def _try_next(self, tracked: Tracked, chain: Chain, search: TailSearch, computed: int) -> None:
        """Asks for the next place. If there is none, or one needs no tail, the search has ended."""
        shape = self._shape
        assert search.here is not None
        search.computed = computed
        search.tried = longest(
            shape.rules, self._telling, shape.block_tokens, search.tried - 1, search.here, shape.recomputed
        )
        search.tries += 1
        end = search.tried * shape.block_tokens - shape.recomputed
        if end <= computed or search.tries > MAX_TRIES:
            search.blocks = 0
            return
        spans = {place: place[1].span(place[0], shape.block_tokens) for place in _needed(shape, search.tried)}
        search.places = [place for place, (first, last) in spans.items() if first < end and last > computed]
        if not search.places:
            search.blocks = search.tried
            return
        prefix = tracked.ask.ticket if tracked.ask is not None else 0
        digests = tail_digests(chain, search.places)
        search.ask = self._client.ask(digests, tracked.epoch, tracked.order, 0, "always", prefix)
        if search.ask is None:
            search.blocks = 0

    def no_place(self, tracked: Tracked, search: TailSearch) -> NoPlace | None:
        """Why the request does not go on where its prefix ends; None: it does, or has come farther itself."""
        shape, here = self._shape, search.here or frozenset()
        end = min(search.reach, last_place(tracked, shape))
        had = (search.computed + shape.recomputed) // shape.block_tokens
        first = max(search.blocks, had, end - MAX_TOLD, 0)
        missing: Counter[int] = Counter()
        for place in range(first + 1, end + 1):
            needs = needed(shape.rules, self._telling, shape.block_tokens, place, shape.recomputed)
            missing.update({part.group for block, part in needs if (block, part) not in here})
        asked = search.tries - (search.blocks == 0)  # the last try found none to ask for
        return NoPlace(search.reach, end - first, asked, sorted(missing.items())) if end > first else None


def end_search(client: SchedulerClient, tracked: Tracked) -> None:
    """Gives back what was pinned for the request's tail. Idempotent."""
    search, tracked.search = tracked.search, None
    if search is not None and search.ask is not None:
        client.release(search.ask)
    if search is not None and search.look is not None:
        client.forget_look(search.look)
