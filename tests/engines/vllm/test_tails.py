"""The search for a place behind which a request can go on, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.block.digest import Chain
from stepwell.block.groups import GroupKind, GroupRule
from stepwell.client.questions import BlocksQuestion, PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.plan import Shape
from stepwell.engines.common.requests import TailSearch, Tracked
from stepwell.engines.vllm.scheduler import tails
from stepwell.engines.vllm.scheduler.tails import TailSearches, end_search

SHAPE = Shape(16, 16, 4096, 1, groups=(GroupRule(GroupKind.FULL, 16), GroupRule(GroupKind.WINDOW, 16, 40)))
NEED = 3
"""Blocks of a window."""


class Played:
    """A client whose well has the tails that `whole` says, and all that is looked for."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        self.asked: list[int] = []
        self.ended: list[Any] = []
        self.slow = False

    def look(self, digests: bytes, epoch: int) -> BlocksQuestion:
        return BlocksQuestion(1, len(digests) // 32)

    def forget_look(self, look: BlocksQuestion) -> None:
        self.ended.append(look)

    def ask(self, digests: bytes, *_: object) -> PrefixQuestion:
        blocks = len(digests) // 32
        self.asked.append(blocks)
        whole = len(self.asked) in self.whole
        return PrefixQuestion(len(self.asked), 7, 0.0, blocks=blocks if whole else blocks - 1, final=True)

    def settle(self, ask: PrefixQuestion, wait_s: float) -> bool:
        return not self.slow

    def offer(self, ask: PrefixQuestion) -> int:
        return ask.blocks

    def release(self, ask: PrefixQuestion) -> None:
        self.ended.append(ask)


def searching(
    client: Played, blocks: int = 20, now: list[float] | None = None
) -> tuple[Any, Tracked, Chain, TailSearch]:
    chain = Chain(16)
    chain.extend(range(16 * blocks + 1))
    request: Any = SimpleNamespace(num_tokens=16 * blocks + 1, num_prompt_tokens=16 * blocks + 1)
    tracked = Tracked(request, order=1, chain=chain, epoch=5, life=1)
    times = now or [0.0]
    searches = TailSearches(SHAPE, cast(SchedulerClient, client), lambda: times[0])
    search = searches.begin(tracked, chain)
    return searches, tracked, chain, search


def test_the_last_place_that_the_prefix_reaches() -> None:
    client = Played()
    client.whole = {1}
    searches, tracked, chain, search = searching(client)
    assert not searches.advance(tracked, chain, search, 12, 0), "it is not answered yet"
    assert search.look is not None
    search.look.here = bytes([1] * 20)
    assert searches.advance(tracked, chain, search, 12, 0)
    assert (search.blocks, client.asked) == (12, [NEED])
    assert [block for block, _ in search.places] == [9, 10, 11]


def test_places_before_are_tried_a_few_times() -> None:
    client = Played()
    searches, tracked, chain, search = searching(client)
    assert search.look is not None
    search.look.here = bytes([1] * 20)
    assert searches.advance(tracked, chain, search, 20, 0)
    assert search.blocks == 0 and len(client.asked) == tails.MAX_TRIES == len(client.ended)
    assert searches.advance(tracked, chain, search, 20, 0) and len(client.asked) == tails.MAX_TRIES


def test_no_answer_is_waited_for_for_ever() -> None:
    now = [1.0]
    client = Played()
    searches, tracked, chain, search = searching(client, now=now)
    assert not searches.advance(tracked, chain, search, 20, 0)
    now[0] += tails.LOOK_S / 2
    assert not searches.advance(tracked, chain, search, 20, 0)
    now[0] += tails.LOOK_S
    assert searches.advance(tracked, chain, search, 20, 0) and search.blocks == 0


def test_what_the_engine_has_is_not_asked_for_and_is_when_it_has_lost_it() -> None:
    """Pages of its own prefix cache may be taken between two looks of its scheduler at the same request."""
    client = Played()
    client.whole = {1, 2}
    searches, tracked, chain, search = searching(client)
    assert search.look is not None
    search.look.here = bytes([1] * 20)
    assert searches.advance(tracked, chain, search, 20, 18 * 16)
    assert (search.blocks, client.asked) == (20, [2])
    assert searches.advance(tracked, chain, search, 20, 17 * 16)
    assert (search.blocks, client.asked, len(client.ended)) == (20, [2, 3], 1)
    assert searches.advance(tracked, chain, search, 20, 18 * 16) and len(client.asked) == 2
    client.slow = True
    assert not searches.advance(tracked, chain, search, 20, 0), "it is asked for anew"


def test_places_that_the_engine_has_reached_itself_are_not_searched() -> None:
    client = Played()
    searches, tracked, chain, search = searching(client)
    assert search.look is not None
    search.look.here = bytes([1] * 20)
    assert searches.advance(tracked, chain, search, 20, 20 * 16) and search.blocks == 0
    assert not client.asked
    client.whole = {1}
    assert searches.advance(tracked, chain, search, 20, 0) and search.blocks == 20, "and when it has lost them"


def test_a_prefix_that_has_become_shorter_ends_before_another_place() -> None:
    """It has given way to another request meanwhile, and blocks of it were evicted."""
    client = Played()
    client.whole = {1, 2}
    searches, tracked, chain, search = searching(client)
    assert search.look is not None
    search.look.here = bytes([1] * 20)
    assert searches.advance(tracked, chain, search, 20, 0) and search.blocks == 20
    assert searches.advance(tracked, chain, search, 12, 0)
    assert search.blocks == 12 and [block for block, _ in search.places] == [9, 10, 11]
    assert len(client.ended) == 1, "what was held for the place before is given back"


def test_of_a_long_prompt_places_are_looked_at_that_its_prefix_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_PLACES", 8)
    client = Played()
    client.whole = {1}
    searches, tracked, chain, search = searching(client)
    assert search.look is None, "nothing is known of its prefix yet"
    assert not searches.advance(tracked, chain, search, 12, 0)
    assert search.look is not None and [block for block, _ in search.looked] == list(range(4, 12))
    search.look.here = bytes([1] * 8)
    assert searches.advance(tracked, chain, search, 12, 0) and search.blocks == 12


def test_what_is_held_is_given_back() -> None:
    client = Played()
    client.whole = {1}
    searches, tracked, chain, search = searching(client)
    assert search.look is not None
    search.look.here = bytes([1] * 20)
    searches.advance(tracked, chain, search, 20, 0)
    tracked.search = search
    end_search(cast(SchedulerClient, client), tracked)
    assert client.ended == [search.ask, search.look] and tracked.search is None
