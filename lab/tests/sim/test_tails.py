"""Walks with models of several cache groups: they find nothing, and they find what is planted."""

from __future__ import annotations

from typing import Any

import pytest

from lab.sim import tails as simulated
from lab.sim.setup import EPOCHS
from lab.sim.walk import walk
from lab.tests.sim.test_sim import MOST_WALKS, _finds, _seeds, _sum
from stepwell.block.groups import Part
from stepwell.engines.vllm.scheduler.tails import TailSearches
from stepwell.hierarchy.levels.looks import Looks
from stepwell.hierarchy.sessions.session import Session
from stepwell.protocol.messages import Look


def test_walks_with_windows_and_states() -> None:
    wanted = ("recalled with a tail", "another place was tried", "looks believed", "ended: no_window", "power cuts")
    walks = (walk(seed, 2000, groups=True) for seed in _seeds(MOST_WALKS))
    seen = _sum(walks, 4, lambda seen: all(seen.get(what) for what in wanted))
    assert all(seen.get(what) for what in wanted), f"the walks do not reach enough: {seen}"


@pytest.mark.nightly
def test_states_after_power_cuts() -> None:
    _sum(walk(seed, 800, cuts=60, groups=True) for seed in _seeds(4))


def test_a_part_whose_digest_does_not_tell_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = Part.digest
    monkeypatch.setattr(Part, "digest", lambda self, block: digest(Part(1, self.number, self.page, self.pages), block))
    _finds("wrong", "looks", groups=True)  # whichever comes first: the bytes of another one, or that it is there


def test_a_place_that_does_not_have_all_of_its_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part is taken for all of them."""
    advance = TailSearches.advance

    def hasty(self: TailSearches, tracked: Any, chain: Any, search: Any, reach: int, computed: int) -> bool:
        known = advance(self, tracked, chain, search, reach, computed)
        if search.blocks < 0 and search.ask is not None and search.ask.blocks:
            search.blocks, known = search.tried, True
        return known

    monkeypatch.setattr(TailSearches, "advance", hasty)
    assert "without all that it needs" in _finds("wrong", groups=True).what


def test_looks_at_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Looks.look

    def other(self: Looks, session: Session, message: Look) -> Any:
        return look(self, session, Look(message.ticket, EPOCHS[message.epoch == EPOCHS[0]], message.digests))

    monkeypatch.setattr(Looks, "look", other)
    assert "never stored" in _finds("looks", groups=True).what


def test_looks_that_say_what_was_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    has, once = Looks._has, set()

    def remembers(self: Looks, *ids: Any) -> bool:
        if has(self, *ids):
            once.update(ids)
        return not once.isdisjoint(ids)

    monkeypatch.setattr(Looks, "_has", remembers)
    _finds("looks", groups=True)


def test_a_tail_that_stays_pinned_when_its_request_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "end_search", lambda client, tracked: None)
    _finds("books", "hits", groups=True)  # whichever comes first: pins of an idle engine, or no room for others


def test_a_look_that_is_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated.TailSearches, "_looked", lambda self, tracked, chain, search, reach: False)
    assert "unanswered" in _finds("late", groups=True).what
