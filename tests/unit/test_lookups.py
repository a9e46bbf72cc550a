"""Which of the well's answers make a lookup of vLLM's offloading wait, and which end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest

from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.vllm.offloading.lookups import MAX_ROOM_S, ROOM_S, Lookups, LookupVerdict

HIT, MISS, RETRY = LookupVerdict.HIT, LookupVerdict.MISS, LookupVerdict.RETRY
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(4)]


class Answering:
    """A client whose questions are answered at once, as the test says: (blocks, reason) each."""

    live = True

    def __init__(self, answers: Iterator[tuple[int, str]]) -> None:
        self._answers = answers
        self.asked: list[int] = []
        self.released = 0

    def ask(self, digests: bytes, epoch: int, order: int, tokens: int = 0) -> PrefixQuestion:
        self.asked.append(len(digests) // 32)
        blocks, reason = next(self._answers)
        return PrefixQuestion(len(self.asked), 1, order, 0.0, blocks, answered=True, final=True, reason=reason)

    def settle(self, ask: PrefixQuestion, wait_s: float) -> bool:
        return True

    def offer(self, ask: PrefixQuestion) -> int:
        return ask.blocks

    def release(self, ask: PrefixQuestion) -> None:
        self.released += 1


def waiting(client: Answering, clock: Callable[[], float] = lambda: 0.0) -> Lookups:
    lookups = Lookups(cast(SchedulerClient, client), 64, {}, lambda: 0, lambda reason: None, clock)
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


@pytest.mark.parametrize("reason", ["pins", "no_room", "gave_way"])
def test_a_run_that_gave_way_to_others_is_asked_for_again(reason: str) -> None:
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
