"""Blocks of conversations that are expected to go on soon are promoted before a request asks for them.

    asked, spilled ──► conversations ──due──► guess ──► a few blocks at a time, parents first ──► level, as UNAWAITED
                                                │
                    told to a request: used ◄───┴──────► not within the window: dropped, and counted

A guess may be wrong, so it gets little: a share of the tier's speed, only while no request waits for the tier and
it is healthy, and a share of host memory, which it gives back when its window has closed. When most guesses are
wrong, nothing is guessed for a while.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from stepwell.block.namespace import BlockId
from stepwell.events import BlocksPrefetched, PrefetchEnded
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.session import Session, SessionPhase
from stepwell.hierarchy.work import Work, WorkStep
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.prefetch.conversations import MAX_CHAIN, MAX_CONVERSATIONS, Conversation, Conversations
from stepwell.policies.prefetch.record import GuessRecord
from stepwell.policies.turns import UNAWAITED

SPEED_SHARE = 0.25
"""Largest share of the tier's speed that guesses use."""

HOST_SHARE = 16
"""Guesses that no request has used yet hold at most one part in so many of host memory."""

BATCH_BYTES = 2 << 20
"""Bytes asked for at a time, at least one block: a request may have to wait for them."""

MAX_LOOKED_AT = 64
"""Blocks in one turn."""

MAX_NOTED = 64
"""Requests that may wait to be noted; nothing is learned of more at a time."""

AGAIN_S = 0.05
"""Seconds until the next attempt when tiers were busy or down."""


@dataclass(slots=True, eq=False)
class Guess:
    """A conversation that is expected to go on before `until`. `at`: how many of its blocks have been looked at;
    `parent` was the last. `promoted`: blocks that were not in host memory; `used`: how many of these were asked for."""

    conversation: Conversation
    turn: int
    until: float
    at: int = 0
    parent: Entry | None = None
    promoted: list[Entry] = field(default_factory=list)
    used: int = 0


class Prefetch:
    def __init__(self, core: Core, arena: Arena, stack: Stack, canaries: CanaryJudge) -> None:
        self._arena = arena
        self._index = core.index
        self._stack = stack
        self._clock = core.clock
        self._emit = core.emit
        self._canaries = canaries
        self._work = core.work
        self._pauses = core.pauses
        self._numbers = count(1)
        self._conversations = Conversations()
        self._record = GuessRecord()
        self._noting = 0  # requests that wait to be noted
        self._due: list[tuple[float, int, Guess]] = []
        self._closing: list[tuple[float, int, Guess]] = []  # by when their window closes
        self._guess: Guess | None = None  # whose blocks are being promoted
        self._next = 0.0  # when it may go on
        self._forgetting: list[bytes] = []  # namespaces that were cleared
        self.held: dict[Entry, Guess] = {}  # promoted, and not used yet
        self.held_bytes = 0

    # what happens -----------------------------------------------------------------------------------------------------

    def asked(self, session: Session, origin: Origin, digests: bytes) -> None:
        """A request of this session has asked for these blocks. Noted in the background; not those of many at once."""
        if self._noting < MAX_NOTED and len(digests) <= 32 * MAX_CHAIN:
            self._noting += 1
            self._work.walk(self._note(session, origin, digests, self._clock.now()))

    def _note(self, session: Session, origin: Origin, digests: bytes, now: float) -> Work:
        ids: list[BlockId] = []
        at: int | None = None
        for first in range(0, len(digests), 32):
            ids.append(origin.name(digests[first : first + 32]))
            if self._conversations.ends(ids[-1]):
                at = len(ids) - 1
            yield WorkStep.DONE
        self._noting -= 1
        conversation = self._conversations.asked(origin.tag, ids, at, now)
        if conversation is not None:
            conversation.asker = session, origin
            self._expect(conversation, session)

    def spilled(self, entry: Entry) -> None:
        """The block has just been published."""
        if entry.parent is not None:
            self._conversations.followed(entry.parent.id, entry.id)

    def used(self, run: Sequence[Entry]) -> None:
        """A request uses these blocks."""
        if self.held:
            for entry in run:
                guess = self._let_go(entry)
                if guess is not None:
                    guess.used += 1

    def left(self, entry: Entry) -> None:
        """The block has gone from host memory."""
        self._let_go(entry)

    def forget(self, namespace: bytes) -> None:
        """The blocks of this namespace, by its tag, are cleared from the tier; of all, if it is empty."""
        self._forgetting.append(namespace)
        self._work.walk(self._forget(namespace))

    def _forget(self, namespace: bytes) -> Work:
        for _ in self._conversations.forget(namespace):
            yield WorkStep.DONE
        self._forgetting.remove(namespace)

    # guessing ---------------------------------------------------------------------------------------------------------

    def _expect(self, conversation: Conversation, session: Session) -> None:
        """Plans the conversation's next turn, if it has a rhythm: its blocks are due earlier by the time that promoting
        them takes."""
        window, speed = conversation.rhythm.window, self._speed
        if window is None or speed is None or session.owner is None:
            return
        nbytes = min(len(conversation) * session.owner.slot_bytes * session.shards, self._most)
        lead = speed.latency_s + nbytes * speed.byte_s / SPEED_SHARE
        guess = Guess(conversation, conversation.turn, conversation.last + window.closes)
        due = conversation.last + max(0.0, window.opens - lead)
        heapq.heappush(self._due, (due, next(self._numbers), guess))
        if len(self._due) > 2 * MAX_CONVERSATIONS:
            self._due = [each for each in self._due if each[2].turn == each[2].conversation.turn]
            heapq.heapify(self._due)

    @property
    def _most(self) -> int:
        return self._arena.host_bytes // HOST_SHARE

    @property
    def _speed(self) -> TierSpeed | None:
        """The slowest that is known of a tier, since a guess may need any of them."""
        return max(self._stack.speeds.values(), key=lambda speed: speed.byte_s, default=None)

    @property
    def next_moment(self) -> float | None:
        """When `turn` has something to do."""
        moments = [queue[0][0] for queue in (self._closing, self._due if self._guess is None else []) if queue]
        if self._guess is not None:
            moments.append(self._next)
        return min(moments, default=None)

    def turn(self) -> None:
        """A little of what is due."""
        now = self._clock.now()
        if self._closing and self._closing[0][0] <= now:
            self._work.walk(self._close(heapq.heappop(self._closing)[2]))
        if self._guess is None:
            if self._due and self._due[0][0] <= now:
                guess = heapq.heappop(self._due)[2]
                if self._record.trusted(now):
                    self._guess, self._next = guess, now
        elif now >= self._next:
            self._promote_some(self._guess, now)

    def _promote_some(self, guess: Guess, now: float) -> None:
        """A few blocks of the guess; or its end."""
        session, origin = guess.conversation.asker
        speed = self._speed
        if (
            now >= guess.until
            or guess.turn != guess.conversation.turn  # it has gone on, or was forgotten
            or session.phase is not SessionPhase.LIVE
            or self._canaries.bars((origin,))
            or self._pauses.recalls
            or any(tag in (b"", origin.tag) for tag in self._forgetting)
            or speed is None
        ):
            self._end(guess)
        elif not self._stack.at_leisure:
            self._next = now + AGAIN_S
        else:
            nbytes = self._some(guess, session, origin)
            self._stack.pump()
            self._next = now + nbytes * speed.byte_s / SPEED_SHARE

    def _some(self, guess: Guess, session: Session, origin: Origin) -> int:
        """Bytes that were asked for."""
        nbytes, before = 0, len(guess.promoted)
        for _ in range(MAX_LOOKED_AT):
            entry = self._step(guess, session, origin)
            if entry is None:
                self._end(guess)
                break
            if self.held.get(entry) is guess:
                nbytes += entry.nbytes
            guess.at, guess.parent = guess.at + 1, entry
            if nbytes >= BATCH_BYTES:
                break
        for number, blocks in Counter(entry.source for entry in guess.promoted[before:]).items():
            self._emit(BlocksPrefetched(self._stack.levels[number].name, blocks))
        return nbytes

    def _step(self, guess: Guess, session: Session, origin: Origin) -> Entry | None:
        """The next block of the guess, in host memory or on its way there. None: there is no more to be had."""
        if guess.at == len(guess.conversation):
            return None
        if guess.parent is not None and self._index.find(guess.parent.id) is not guess.parent:
            return None
        id = guess.conversation.block(guess.at)
        entry = self._index.find(id)
        if entry is not None:
            return entry
        assert session.owner is not None
        nbytes = session.owner.slot_bytes * session.shards
        if self.held_bytes + nbytes > self._most or (source := self._stack.find(id)) is None:
            return None
        entry = source.level.promote(session, origin, id, guess.parent, UNAWAITED)
        if entry is not None:
            guess.promoted.append(entry)
            self.held[entry] = guess
            self.held_bytes += entry.nbytes
        return entry

    def _end(self, guess: Guess) -> None:
        """Promotes no more for the guess; what was promoted stays until its window closes."""
        self._guess = guess.parent = None
        if guess.promoted:
            heapq.heappush(self._closing, (guess.until, next(self._numbers), guess))

    def _close(self, guess: Guess) -> Work:
        """The guess's window is over. Blocks that no request has used are dropped; the tier still has them."""
        self._record.ended(self._clock.now(), right=2 * guess.used >= len(guess.promoted))
        self._emit(PrefetchEnded(guess.used, len(guess.promoted) - guess.used))
        for entry in reversed(guess.promoted):
            if self._let_go(entry) is not None and entry.evictable:
                self._arena.drop(entry, "unused")
            yield WorkStep.DONE

    def _let_go(self, entry: Entry) -> Guess | None:
        """Ends the guess for this block, if there is one; returns it."""
        guess = self.held.pop(entry, None)
        if guess is not None:
            self.held_bytes -= entry.nbytes
        return guess
