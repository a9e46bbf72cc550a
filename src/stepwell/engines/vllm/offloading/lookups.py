"""Which chunks can be loaded: one question to the well for each run of keys, answered key by key.

vLLM looks up a request's keys one at a time, all of them in a pass, and passes over them again at every step until none
is answered RETRY. The first pass gathers the keys; at the end of the step they go to the well as one question. When it
has said how far the run reaches, in its memory or in a tier, the leading blocks are hits, and vLLM loads them in that
step: their job copies each as it lands. What was pinned and is not loaded is given back.

No request waits for ever, and none is sent round in circles: a question has the client's own time limits, a chunk is
promoted at most once for a request (one that is looked up again was evicted from vLLM's host memory since, or could not
be loaded), and a request is promoted no more rows than that memory holds beside what others need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from stepwell.client.questions import FOR_ROOM
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.vllm.offloading.key_runs import (
    ChunkGroup,
    GroupLookup,
    KeyRun,
    LoadPart,
    RequestLookup,
    group_of,
)
from stepwell.protocol.limits import MAX_DIGESTS

MAX_PROMOTED = 0.75
"""Share of vLLM's rows that one request may be promoted."""

MAX_BUSY = 0.95
"""Share of them that all jobs together may hold."""

MAX_READING = 0.9
"""Share of them that jobs together may hold when one more begins whose chunks are still read, unless it is alone: so
what is in the arena finds rows while others wait for a tier. Such a job begins with all of its rows or waits for
them: with a part of them it would come in parts, and a step of the scheduler passes before each."""

HELD_S, HELD_STEPS = 1.0, 8
"""Seconds that a run which is pinned waits for rows that are free; then its request is computed. A run that vLLM looks
up no more for so long and for so many steps is given up: vLLM has its chunks from elsewhere."""

ROOM_S, MAX_ROOM_S = 2.0, 30.0
"""Seconds that a request waits until the arena has room for the first of its blocks: the former once for each request
that waits for anything, the latter in all."""

MAX_ROUNDS = 64
"""Times that one request may ask for one cache group, those not counted that found no room."""

WINDOW_ENDS, MAX_SEARCHES = 16, 5
"""Chunks that are tried together as the end of a window, where the first one was not stored; and times that a request
asks for a window without finding anything of one: so it is found up to 64 chunks before the end of the prompt."""


class LookupVerdict(Enum):
    HIT = auto()
    MISS = auto()
    RETRY = auto()


class Lookups:
    """For one thread, the scheduler's. `rows`: chunks that vLLM's host memory holds. `groups`: by their number in
    keys. `busy_rows`: rows that jobs hold now."""

    def __init__(
        self,
        client: SchedulerClient,
        rows: int,
        groups: Mapping[int, ChunkGroup],
        busy_rows: Callable[[], int],
        answered: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._limit = max(1, int(rows * MAX_PROMOTED))
        self._limit_of_all = max(1, int(rows * MAX_BUSY))
        self._limit_of_reads = max(1, int(rows * MAX_READING))
        self._groups = groups
        windows = [group.window for group in groups.values() if group.window is not None]
        self._limit_of_prefix = max(1, (self._limit - sum(windows)) // max(1, len(groups) - len(windows)))
        self._busy_rows = busy_rows
        self._answered = answered
        self._clock = clock
        self._requests: dict[str, RequestLookup] = {}
        self._open: dict[str, RequestLookup] = {}  # those with a run
        self._orders = 0
        self._step = 0
        self._promised = 0  # rows, in this step
        self.epoch = 0

    def begin(self, request_id: str) -> None:
        self._orders += 1
        self.end(request_id)  # its id is used again
        self._requests[request_id] = RequestLookup(self._orders)

    def lookup(self, request_id: str, key: bytes, end_token: int) -> LookupVerdict:
        request = self._requests.get(request_id)
        if request is None:
            return LookupVerdict.MISS
        number = group_of(key)
        group = request.groups.get(number)
        if group is None:
            group = request.groups[number] = GroupLookup(self._groups.get(number, ChunkGroup()))
        if key in group.closed or self._behind_reach(request, group, end_token):
            return self._miss(request, group, end_token)
        run = group.run
        if run is None:
            return self._gathered(request_id, request, group, key, end_token)
        first_in_step = self._looked(run)
        if run.ask is None:
            if key not in run.at and len(run.keys) < self._max_keys(group):
                run.add(key, end_token)
            return LookupVerdict.RETRY
        if run.blocks < 0 and not (first_in_step and self._settled(group, run)):
            return LookupVerdict.RETRY
        if key in group.closed:
            return self._miss(request, group, end_token)
        return self._answer(request, group, run, key, end_token)

    def _looked(self, run: KeyRun) -> bool:
        """Takes note that vLLM looks up a key of this run. True: the first one in this step."""
        if run.looked == self._step:
            return False
        run.looked, run.looked_at = self._step, self._clock()
        return True

    def _miss(self, request: RequestLookup, group: GroupLookup, end_token: int) -> LookupVerdict:
        if group.of_engine.window is None and end_token:
            request.reach = self._step, end_token - group.of_engine.tokens
        return LookupVerdict.MISS

    def _behind_reach(self, request: RequestLookup, group: GroupLookup, end_token: int) -> bool:
        """The chunk of a window lies behind the first one that a group lacks which needs all of a prefix. vLLM asks for
        it all the same while other chunks of that group are being loaded."""
        step, reach = request.reach
        windowed = group.of_engine.window is not None
        return windowed and step == self._step and end_token - group.of_engine.tokens >= reach

    def _max_keys(self, group: GroupLookup) -> int:
        return MAX_DIGESTS if group.of_engine.window is None else group.of_engine.window + WINDOW_ENDS - 1

    def _may_ask(self, request: RequestLookup, group: GroupLookup) -> bool:
        most = MAX_ROUNDS if group.of_engine.window is None or group.promoted else MAX_SEARCHES
        return group.rounds < most and self._may_promote(request, group)

    def _may_promote(self, request: RequestLookup, group: GroupLookup) -> bool:
        """A prefix is of use with all of its groups only, and windows come last: rows are left for them, and for other
        groups that need all of a prefix."""
        if group.of_engine.window is None:
            return group.promoted < self._limit_of_prefix
        return sum(other.promoted for other in request.groups.values()) < self._limit

    def _gathered(
        self, request_id: str, request: RequestLookup, group: GroupLookup, key: bytes, end_token: int
    ) -> LookupVerdict:
        """The first key of a new run. A group that needs a window only is asked for when it is known how far the
        others reach: until then its keys are those of a window too far back or too far on. vLLM looks the others up
        first in each step: a run of theirs that it did not look up in this one is none that it waits for."""
        if not (self._client.live and self._may_ask(request, group)):
            return self._miss(request, group, end_token)
        if group.of_engine.window is not None and (
            request.loading
            or any(
                other.run is not None and other.run.looked == self._step
                for other in request.groups.values()
                if other.of_engine.window is None
            )
        ):
            return LookupVerdict.RETRY
        group.run = KeyRun()
        group.run.add(key, end_token)
        self._looked(group.run)
        request.progress_at = request.progress_at or self._clock()
        self._open[request_id] = request
        return LookupVerdict.RETRY

    def _answer(
        self, request: RequestLookup, group: GroupLookup, run: KeyRun, key: bytes, end_token: int
    ) -> LookupVerdict:
        at = run.at.get(key)
        if at is None:
            return LookupVerdict.RETRY  # it is asked for next
        if at < run.blocks:
            return self._hit(request, group, key, end_token)
        if run.reason in FOR_ROOM and (run.blocks or self._may_wait(request)):
            return LookupVerdict.RETRY  # more of it can be pinned when these, or those of others, have been copied
        if group.of_engine.window is not None and at > run.blocks:
            return LookupVerdict.RETRY  # a window that ends farther back is asked for next
        group.closed.add(key)
        if group.of_engine.window is not None and not run.blocks:
            self._let_go(group, run)
        return self._miss(request, group, end_token)

    def _let_go(self, group: GroupLookup, run: KeyRun) -> None:
        """Gives back what is pinned of this run, if anything. The next key is the first of another one."""
        for ask in run.questions():
            self._client.release(ask)
        group.run = None

    def _may_wait(self, request: RequestLookup) -> bool:
        """Others, or its blocks before these, have the room that is needed, and it has not waited too long for that."""
        return request.loading > 0 or self._clock() - request.progress_at < min(ROOM_S * len(self._open), MAX_ROOM_S)

    def _settled(self, group: GroupLookup, run: KeyRun) -> bool:
        """It is known which chunks can be had. Of a group that is loaded from the prompt's beginning they may still lie
        in a tier: the job copies each when it has landed, and what does not land fails there. Of a window the first
        question that finds something counts."""
        while self._heard(group, run):
            if run.blocks or run.reason in FOR_ROOM or not run.further:
                run.settled_at = self._clock()
                wanted = min(len(run.keys), group.of_engine.window or MAX_DIGESTS)
                if run.blocks < wanted and run.reason not in FOR_ROOM:
                    self._answered(run.reason)
                return True
            assert run.ask is not None
            self._client.release(run.ask)
            group.closed.add(run.shorten())
        return False

    def _heard(self, group: GroupLookup, run: KeyRun) -> bool:
        """The question is answered as far as this group needs it."""
        assert run.ask is not None
        over = self._client.settle(run.ask, 0.0)
        ends = run.ask.ends if group.of_engine.window is None else ""
        if not (over or ends):
            run.blocks = -1
            return False
        run.blocks = self._client.offer(run.ask, streamed=bool(ends))
        run.streams = run.blocks > run.ask.blocks
        run.reason = ends or (run.ask.reason if run.ask.final or run.ask.reason in FOR_ROOM else "too_slow")
        return True

    def _hit(self, request: RequestLookup, group: GroupLookup, key: bytes, end_token: int) -> LookupVerdict:
        run = group.run
        assert run is not None
        if not self._may_promote(request, group):
            group.closed.add(key)
            return self._miss(request, group, end_token)
        if not self._admits(group, run):
            if (run.streams and self._may_wait(request)) or self._clock() - run.settled_at < HELD_S:
                return LookupVerdict.RETRY
            group.closed.add(key)
            return self._miss(request, group, end_token)
        self._promised += 1
        group.promoted += 1
        request.progress_at = self._clock()
        return LookupVerdict.HIT

    def _admits(self, group: GroupLookup, run: KeyRun) -> bool:
        """There is a row for one more chunk of this run."""
        busy = self._busy_rows() + self._promised
        if not run.streams:
            return busy < self._limit_of_all
        wanted = min(run.blocks, self._limit_of_prefix - group.promoted)
        run.admitted = run.admitted or not busy or busy + wanted <= self._limit_of_reads
        return run.admitted

    def take(self, request_id: str, keys: Sequence[bytes]) -> list[LoadPart]:
        """Hands the runs that these keys are of over to a job. Keys that were not promised are in none: the job has
        nothing to load for them."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        parts: list[LoadPart] = []
        for group in request.groups.values():
            run = group.run
            if run is not None and run.blocks > 0 and not run.at.keys().isdisjoint(keys):
                group.closed.update(keys)
                group.run = None
                while run.further:
                    self._client.release(run.further.pop())
                parts.append(LoadPart(run, self.epoch))
        request.loading += 1
        return parts

    def loaded(self, request_id: str) -> None:
        """A job that was given blocks of this request has ended."""
        if (request := self._requests.get(request_id)) is not None:
            request.loading = max(0, request.loading - 1)
            request.progress_at = self._clock()

    def end_of_step(self) -> None:
        """Puts what was gathered in this step as questions, and gives back what was pinned and not taken."""
        self._step += 1
        self._promised = 0
        for request_id, request in list(self._open.items()):
            for group in request.groups.values():
                if group.run is not None:
                    self._advance(request, group, group.run)
            if not any(group.run for group in request.groups.values()):
                del self._open[request_id]

    def _advance(self, request: RequestLookup, group: GroupLookup, run: KeyRun) -> None:
        now = self._clock()
        if run.ask is None:
            self._put(request, group, run)
        elif run.blocks < 0:
            if now - run.looked_at >= HELD_S and self._step - run.looked >= HELD_STEPS:
                self._let_go(group, run)
        elif run.blocks == 0 or now - run.settled_at >= HELD_S:
            group.rounds -= run.blocks == 0 and run.reason in FOR_ROOM
            self._let_go(group, run)

    def _put(self, request: RequestLookup, group: GroupLookup, run: KeyRun) -> None:
        """Asks for the run; of a window that does not lie where it was looked for first, for all that it may be."""
        window = group.of_engine.window
        ends = WINDOW_ENDS if window is not None and group.rounds and not group.promoted else 1
        group.rounds += 1
        for first in range(min(ends, len(run.keys))):
            digests = bytes(run.digests[32 * first : 32 * (first + (window or MAX_DIGESTS))])
            ask = self._client.ask(digests, self.epoch, request.order, run.end_token)
            if ask is None:
                break
            if run.ask is None:
                run.ask = ask
            else:
                run.further.append(ask)
        if run.ask is None:
            group.closed.update(run.keys)
            group.run = None

    def end(self, request_id: str) -> None:
        """The request is over. Jobs that were given its blocks have them still."""
        self._open.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        for group in request.groups.values() if request is not None else ():
            if group.run is not None:
                self._let_go(group, group.run)

    def reset(self, epoch: int) -> None:
        """A new epoch: what was stored before it is never found. Questions of before are given up."""
        self.epoch = epoch
        for request_id, request in list(self._requests.items()):
            self.end(request_id)
            self._requests[request_id] = RequestLookup(request.order)
