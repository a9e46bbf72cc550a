"""Which of the well's answers make a lookup of vLLM's offloading wait, and which end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest

from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.vllm.offloading.key_runs import ChunkGroup
from stepwell.engines.vllm.offloading.lookups import MAX_ROOM_S, MAX_ROUNDS, ROOM_S, Lookups, LookupVerdict

HIT, MISS, RETRY = LookupVerdict.HIT, LookupVerdict.MISS, LookupVerdict.RETRY
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(4)]


class Answering:
    """A client whose questions are answered at once, as the test says: (blocks, reason) each. A reason "staging" is no
    last answer: so many blocks are known to lie in a tier, if any are."""

    live = True

    def __init__(self, answers: Iterator[tuple[int, str]]) -> None:
        self._answers = answers
        self.asked: list[int] = []
        self.given: list[PrefixQuestion] = []
        self.released = 0

    def ask(self, digests: bytes, epoch: int, order: int, tokens: int = 0) -> PrefixQuestion:
        self.asked.append(len(digests) // 32)
        blocks, reason = next(self._answers)
        final = reason != "staging"
        question = PrefixQuestion(len(self.asked), 1, 0.0, answered=True, final=final, reason=reason)
        if final:
            question.blocks = blocks
        elif blocks:
            question.known, question.ends = blocks, "never_seen"
        self.given.append(question)
        return question

    def settle(self, ask: PrefixQuestion, wait_s: float) -> bool:
        return ask.final

    def offer(self, ask: PrefixQuestion, *, streamed: bool = False) -> int:
        return max(ask.blocks, ask.known) if streamed else ask.blocks

    def release(self, ask: PrefixQuestion) -> None:
        self.released += 1


def waiting(client: Answering, clock: Callable[[], float] = lambda: 0.0, group: ChunkGroup | None = None) -> Lookups:
    lookups = Lookups(
        cast(SchedulerClient, client), 64, {0: group or ChunkGroup(16)}, lambda: 0, lambda reason: None, clock
    )
    lookups.begin("r")
    return lookups


def step(lookups: Lookups) -> list[LookupVerdict]:
    """What a request is told of its keys in one step of the engine: up to the first miss, as vLLM asks."""
    verdicts = []
    for key in KEYS:
        verdicts.append(lookups.lookup("r", key, 16))
        if verdicts[-1] is MISS:
            break
    lookups.end_of_step()
    return verdicts


@pytest.mark.parametrize("reason", ["pins", "no_room"])
def test_a_run_that_others_leave_no_room_is_asked_for_again(reason: str) -> None:
    client = Answering(iter([(0, reason)] * 5 + [(4, "")]))
    lookups = waiting(client)
    told = [step(lookups) for _ in range(12)]
    assert told[-1] == [HIT] * 4 and all(verdicts == [RETRY] * 4 for verdicts in told[:-1]), told
    assert client.asked == [4] * 6 and client.released == 5


@pytest.mark.parametrize("reason", ["unknown", "recompute", "paused", ""])
def test_a_run_that_ends_for_another_reason_is_a_miss(reason: str) -> None:
    client = Answering(iter([(2, reason)]))
    lookups = waiting(client)
    assert step(lookups) == [RETRY] * 4
    assert step(lookups) == [HIT, HIT, MISS]
    assert client.asked == [4]


def test_what_lies_in_a_tier_is_a_hit_once_it_is_known_how_far_it_reaches() -> None:
    client = Answering(iter([(0, "staging")]))
    lookups = waiting(client)
    assert step(lookups) == [RETRY] * 4
    assert [step(lookups) for _ in range(3)] == [[RETRY] * 4] * 3, "nothing is said of how far it reaches"
    client.given[0].known, client.given[0].ends = 3, "never_seen"
    assert [lookups.lookup("r", key, 16) for key in KEYS] == [HIT, HIT, HIT, MISS]
    (part,) = lookups.take("r", KEYS[:3])
    assert part.ask is client.given[0]
    assert part.rows(KEYS, [5, 6, 7, 8]) == {0: (KEYS[0], 5), 1: (KEYS[1], 6), 2: (KEYS[2], 7)}
    assert lookups.lookup("r", KEYS[3], 16) is MISS
    lookups.end_of_step()
    assert client.asked == [4] and client.released == 0


def test_what_a_tier_reads_for_a_window_is_no_hit_yet() -> None:
    client = Answering(iter([(4, "staging")]))
    lookups = waiting(client, group=ChunkGroup(16, 4))
    assert [step(lookups) for _ in range(4)] == [[RETRY] * 4] * 4
    client.given[0].blocks, client.given[0].final = 4, True
    assert step(lookups) == [HIT] * 4


def test_no_request_waits_for_room_for_ever() -> None:
    now = 0.0
    client = Answering(iter([(0, "pins")] * 1000))
    lookups = waiting(client, lambda: now)
    assert step(lookups) == [RETRY] * 4
    while MISS not in (told := step(lookups)):
        assert told == [RETRY] * 4
        now += 0.25
        assert now < MAX_ROOM_S
    assert ROOM_S <= now <= ROOM_S + 0.5, "it ends with the first answer of after that time"


def test_no_window_is_looked_for_without_room_for_ever() -> None:
    """A window that ends farther back is asked for when one finds no room: of a long prompt there are many."""
    now = 0.0
    client = Answering(iter([(0, "pins")] * 10_000))
    lookups = waiting(client, lambda: now, ChunkGroup(16, 4))
    keys = [number.to_bytes(32, "big") + KEYS[0][32:] for number in range(1000)]
    while any(lookups.lookup("r", key, 16) is RETRY for key in keys):
        lookups.end_of_step()
        now += 0.01
        assert now < 2 * ROOM_S + 0.1 * MAX_ROUNDS
