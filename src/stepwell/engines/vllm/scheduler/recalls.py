"""A request's way in: its prefix is offered when vLLM asks, and loads are planned when its pages are allocated.

What lies in a tier is offered as soon as the first block of it has landed, if it is known by then how far it reaches:
it is a stream, which workers copy as it lands. Of a stream that falls short the engine computes the rest.

Nothing here waits for the well, except at most a millisecond at a request's first ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepwell.block.digest import Chain
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.canaries import Canaries
from stepwell.engines.common.counts import Tally
from stepwell.engines.common.plan import Load, LoadBlock, Ref, Shape, StepPlan, StepReport
from stepwell.engines.common.requests import Loading, Place, TailSearch, Tracked
from stepwell.engines.common.tasks import Handover
from stepwell.engines.vllm.scheduler.live import LiveRequests
from stepwell.engines.vllm.scheduler.tails import TailSearches, digest_of, end_search, last_place

MAX_STREAMS = 4096
"""Streams that are waited for; no engine has more requests under way."""

FIRST_ASK_WAIT_S = 0.0007  # a wait ends 0.1 to 0.2 ms late (timer slack, a change of threads): 1 ms in all


class EngineRecalls:
    """`plan` is that of the next step, which gets the loads."""

    def __init__(
        self,
        live: LiveRequests,
        plan: Handover[StepPlan],
        shape: Shape,
        client: SchedulerClient,
        tally: Tally,
        canaries: Canaries,
    ) -> None:
        self._live = live
        self._plan = plan
        self._shape = shape
        self._client = client
        self._tally = tally
        self._canaries = canaries
        self._tails = TailSearches(shape, client, live.clock)
        self._parked: Tracked | None = None  # of several groups: the request that was recalled last
        self._streams: dict[int, Loading] = {}  # that not all ranks have reported, by transfer

    def ask(self, tracked: Tracked, chain: Chain) -> None:
        """Posts the questions for its prefix, and for places near which its tail is stored."""
        tracked.ask = self._live.ask(tracked, chain)
        if tracked.ask is not None and self._shape.tail:
            tracked.search = self._tails.begin(tracked, chain)

    def matched(self, tracked: Tracked, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be recalled now; None: ask again."""
        request = tracked.request
        if tracked.chain is None or tracked.failed:
            return 0, False
        if tracked.ask is None and not tracked.asked:
            tracked.chain.extend(request.all_token_ids[tracked.chain.tokens :])
            self.ask(tracked, tracked.chain)
            if tracked.ask is None:
                self._client.count("missed_no_session" if tracked.chain.digests else "missed_short_prompt")
        first = not tracked.asked
        if first and not self._live.as_it_was(tracked):
            return 0, False
        if first:
            tracked.asked, tracked.asked_at = True, self._live.clock()
        ask = tracked.ask
        if ask is None:
            return 0, False
        if computed >= self._shape.resumed(len(tracked.chain) * len(self._shape.prefix), request.num_tokens):
            return 0, False  # the engine has it all: nothing to wait for
        if self._waits_for_another(tracked):
            return None, False
        if not tracked.streams:
            over = self._client.settle(ask, FIRST_ASK_WAIT_S if first else 0)
            tracked.streams = (ask.final or not over) and self._may_stream(tracked, ask, computed)
            if not (over or tracked.streams):
                return None, False
        if tracked.search is not None and not self._tails.advance(
            tracked, tracked.chain, tracked.search, ask.blocks // len(self._shape.prefix), computed
        ):
            return None, False
        blocks = self._client.offer(ask, streamed=tracked.streams)
        if not (blocks or ask.settled):  # it has given way to another request in this moment
            tracked.streams = False
            return None, False
        tracked.known = max(tracked.known, blocks)
        blocks -= blocks % len(self._shape.prefix)
        if tracked.search is not None:
            blocks = self._with_tail(tracked, tracked.search, ask, blocks)
        tracked.offered_from, tracked.offered_at = computed, self._live.clock()
        end = self._shape.resumed(blocks, request.num_tokens)
        tokens = end - computed
        parts = len(self._shape.prefix)
        tracked.spare = blocks - min(blocks, -(-end // self._shape.block_tokens) * parts)
        if tokens <= 0 or self._canaries.takes(tracked, computed, blocks):
            return 0, False
        return tokens, True

    def _waits_for_another(self, tracked: Tracked) -> bool:
        """Another request has a recall and was not scheduled since. Where groups have windows vLLM counts pages that
        such a request still needs too low (0.32): several at a time may fill its pool, and none goes on."""
        other = self._parked
        if other is None or other is tracked or other.loading is None or other.chain is None:
            return False
        return self._live.known.get(other.request.request_id) is other

    def _with_tail(self, tracked: Tracked, search: TailSearch, ask: PrefixQuestion, blocks: int) -> int:
        """Of these stored blocks of the prefix, how many lie before the place where the request can go on."""
        reach = blocks // len(self._shape.prefix)
        found = search.blocks if search.ask is None or search.ask.session == ask.session else 0
        if found < min(reach, last_place(tracked, self._shape)):
            tracked.parting = reach
        tracked.tail_known = max(tracked.tail_known, found)
        return min(reach, found) * len(self._shape.prefix)

    def _may_stream(self, tracked: Tracked, ask: PrefixQuestion, computed: int) -> bool:
        """It is known how far the run reaches, farther than what has landed of it (or than can, where room is short),
        and the first block that is needed has landed: the tier answers. A canary waits for all that can land, any block
        of which may be the wrong one."""
        if self._shape.by_request:
            return False  # of a load that falls short the engine would keep nothing
        more = bool(ask.ends) and ask.known > ask.blocks > computed // self._shape.block_tokens
        return more and not self._canaries.takes(tracked, computed, ask.known)

    def allocated(self, tracked: Tracked, tables: Sequence[Sequence[int]], external: int) -> None:
        """The request has its pages; `external` tokens of them are to be recalled (0: none, or known already). If this
        raises, the caller must `refuse` them: the request is parked until its load is reported."""
        request_id = tracked.request.request_id
        tracked.tables = [list(table) for table in tables]
        ask, parts = tracked.ask, len(self._shape.prefix)
        start, end = tracked.offered_from, tracked.offered_from + external
        first = start // self._shape.block_tokens * parts
        last = -(-end // self._shape.block_tokens) * parts
        offered, tracked.streams = tracked.streams, False
        streams = offered and external > 0 and ask is not None and ask.blocks < last
        if ask is not None and ask.first_poll and not streams:  # waited for: the engine alone did not have it all
            if ask.final or offered:
                self._tally.answered(ask.reason if ask.final else ask.ends)
            else:
                self._client.count("missed_too_slow")
            found = tracked.search.blocks if tracked.search is not None else -1
            if found >= 0 and tracked.search is not None:
                ask.no_place = self._tails.no_place(tracked, tracked.search)
            if not found and self._shape.resumed(ask.blocks, tracked.request.num_tokens) > start:
                self._client.count("missed_no_window")
            if external == 0:
                tracked.wait_s += self._live.clock() - tracked.asked_at  # in vain
        if external == 0:
            if self._canaries.begins(tracked):
                self._live.spilling[request_id] = tracked
            elif ask is not None:
                if ask.final and self._shape.resumed(ask.blocks, tracked.request.num_tokens) <= start:
                    ask.needless()
                self._client.finish(ask)
                tracked.ask, tracked.answer = None, ask
            end_search(self._client, tracked)
            return
        if ask is None:
            raise LookupError("tokens were allocated that were not offered")
        lay = b"".join(bytes([place]) * min(blocks, last) for place, blocks in ask.lies)
        sources = (bytes(ask.sources) + lay[len(ask.sources) :])[first:last].ljust(last - first, b"\0")
        load = Load(request_id, ask.session, 0, [])
        tail = tracked.search.places if tracked.search is not None else []
        tracked.loading = loading = Loading(
            load, first, start, external, last - first + len(tail), tail, sources, ends=ask.ends
        )
        places = self._shape.places(first, last)
        rows: list[list[Ref]] = [[]] * len(places)
        if streams:
            load.transfer, load.limits = self._client.stream(ask, first, last - first, spare=tracked.spare)
            loading.ranks, self._streams[load.transfer] = self._shape.world, loading
            if len(self._streams) > MAX_STREAMS:  # reports of them were lost
                self._client.stream_ended(oldest := next(iter(self._streams)))
                del self._streams[oldest]
        else:
            load.transfer, refs = self._client.recall(ask, first, last - first, spare=tracked.spare)
            rows = refs.tolist()
        tracked.ask = None
        if tracked.search is not None and tracked.search.ask is not None:
            load.also, refs = self._client.recall(tracked.search.ask, 0, len(tail))
            rows += refs.tolist()
        load.blocks += self._prefix_blocks(tracked, places, rows, start)
        for place, row in zip(tail, rows[len(places) :], strict=True):
            load.blocks.append((row, *self._wanted(tracked, place, start)))
            if not load.blocks[-1][2] and place[1].span(place[0], self._shape.block_tokens)[1] > start:
                raise LookupError("there is no page for what the request needs")
        end_search(self._client, tracked)
        if self._shape.by_request:
            self._parked = tracked
        if self._live.suspect:
            self._live.suspect.difference_update(tracked.tables[0][start // self._shape.page :])
        tracked.wait_s += tracked.offered_at - tracked.asked_at
        self._plan.now.loads.append(load)

    def _prefix_blocks(
        self, tracked: Tracked, places: Sequence[Place], rows: Sequence[list[Ref]], start: int
    ) -> list[LoadBlock]:
        """The blocks of a load from token `start` on; the scheduler waits for this loop."""
        bt = self._shape.block_tokens
        blocks: list[LoadBlock] = []
        for (block, part), row in zip(places, rows, strict=False):
            at = block * bt // part.page + part.first
            blocks.append((row, 0, tracked.tables[part.group][at : at + part.pages]))
        for number in range(len(self._shape.prefix) if start % bt else 0):
            blocks[number] = rows[number], *self._wanted(tracked, places[number], start)
        return blocks

    def _wanted(self, tracked: Tracked, place: Place, start: int) -> tuple[int, Sequence[int]]:
        """Of a block's pages, how many at its beginning are left out: they hold tokens before `start`, or ones that the
        engine needs no more and has no page for (0); and the others."""
        (block, part), bt = place, self._shape.block_tokens
        pages = part.of_table(tracked.tables[part.group], block, bt)
        skip = max(0, start - part.span(block, bt)[0]) // part.page
        while skip < len(pages) and pages[skip] == 0:
            skip += 1
        return min(skip, len(pages)), pages[skip:]

    def sources(self, tracked: Tracked, external: int) -> dict[str, int]:
        """The tokens that the request was allocated pages for just now, by the tier that they were in."""
        return self._by_tier(tracked.loading, external) if tracked.loading is not None else {}

    def _by_tier(self, loading: Loading, tokens: int) -> dict[str, int]:
        return loading.by_tier(tokens, self._shape.tokens, self._client.tiers)

    def refuse(self, request_id: str, tables: Sequence[Sequence[int]], external: int) -> None:
        """Lets a recall fail that could not be planned, and ends its lease. A parked request's table ends with what it
        waits for."""
        tracked = self._live.known.get(request_id)
        load = tracked.loading.load if tracked is not None and tracked.loading is not None else None
        session, transfer, also = (load.session, load.transfer, load.also) if load is not None else (0, 0, 0)
        missing = list(tables[0])[-external // self._shape.page :]
        self._plan.now.loads.append(Load(request_id, session, transfer, [([], 0, missing)], also=also))

    def admitted(self, tracked: Tracked) -> None:
        """Takes note of the request's first step since it (re)started. What was recalled is in its pages; engine hits
        may be pages that another request computes in this very step, so nothing is confirmed before the step is."""
        tracked.admitted, tracked.failed = True, False
        loading, tracked.loading = tracked.loading, None
        if loading is not None:
            arrived = self._shape.tokens(loading.first + loading.good) - loading.start
            if self._shape.by_request and not loading.whole:
                arrived = 0
            arrived = max(0, min(loading.tokens, arrived))
            tracked.recalled_tokens += arrived
            tiers = self._by_tier(loading, arrived)
            for tier, tokens in tiers.items():
                tracked.tiers[tier] = tracked.tiers.get(tier, 0) + tokens
            self._tally.recalled(tiers, loading.seconds)
            tracked.recall_s += loading.seconds
            tracked.copy_s += loading.copy_s

    # what workers report ----------------------------------------------------------------------------------------------

    def failed(self, request_id: str, transfer: int, bad: int) -> None:
        """Drops the first block that did not load before another request asks for it, or it would be offered for
        ever."""
        self._client.count("failed_loads")
        loading = self._loading(request_id, transfer)
        if loading is None:
            return
        tracked, place = self._live.known[request_id], self._missing(loading, bad)
        if tracked.chain is not None:
            digest = digest_of(tracked.chain, place, self._shape)
            self._client.forget(loading.load.session, digest, tracked.epoch)

    def _missing(self, loading: Loading, good: int) -> Place:
        """Of this load only so many blocks have come. Returns the next one."""
        tracked = self._live.known[loading.load.request]
        tracked.failed = True
        loading.good = min(loading.good, good)
        in_tail = good - len(loading.load.blocks) + len(loading.tail)
        if in_tail >= 0 and loading.tail:
            tracked.tail_known = 0
            return loading.tail[in_tail]
        tracked.known = min(tracked.known, loading.first + good)
        return self._shape.place(loading.first + good)

    def fell_short(self, request_id: str, transfer: int, came: int, reason: str, copy_s: float) -> None:
        """Blocks of a stream that have not come may well be there for the next request."""
        loading = self._loading(request_id, transfer)
        if loading is not None:
            self._missing(loading, came)
            self._arrived(loading, copy_s)
            loading.late = reason if loading.late in ("", "gave_way") else loading.late  # one rank ends the others'

    def reported(self, transfer: int) -> None:
        """A rank has ended its part of this transfer. When all have, it is known what became of a stream."""
        loading = self._streams.get(transfer)
        if loading is None:
            return
        loading.ranks -= 1
        if loading.ranks:
            return
        del self._streams[transfer]
        self._client.stream_ended(transfer)
        if self._unwanted(loading):
            return
        self._client.count("whole_streams" if loading.whole else "short_streams")
        if loading.late == "too_slow":
            self._client.count("missed_too_slow")
        else:
            self._tally.answered(loading.late or loading.ends)

    def _unwanted(self, loading: Loading) -> bool:
        return self._loading(loading.load.request, loading.load.transfer) is not loading

    @property
    def unwanted(self) -> list[int]:
        """Transfers of streams whose requests have ended."""
        return [transfer for transfer, loading in self._streams.items() if self._unwanted(loading)]

    def copies(self, report: StepReport) -> Iterator[tuple[int, float]]:
        """For each load, bytes of its blocks and seconds that a rank took for its part."""
        for request_id, transfer, copy_s in report.loaded:
            loading = self._loading(request_id, transfer)
            if loading is not None:
                yield len(loading.load.blocks) * self._shape.block_bytes, copy_s

    def loaded(self, report: StepReport) -> None:
        for request_id, transfer, copy_s in report.loaded:
            loading = self._loading(request_id, transfer)
            if loading is not None:
                self._arrived(loading, copy_s)

    def _arrived(self, loading: Loading, copy_s: float) -> None:
        loading.seconds = self._live.clock() - self._live.known[loading.load.request].asked_at
        loading.copy_s = max(loading.copy_s, copy_s)

    def _loading(self, request_id: str, transfer: int) -> Loading | None:
        tracked = self._live.known.get(request_id)
        loading = tracked.loading if tracked is not None else None
        return loading if loading is not None and loading.load.transfer == transfer else None
