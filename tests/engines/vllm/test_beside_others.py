"""Other connectors beside ours: as a part of one it keeps away, and what others fail to load is never kept.

The other one is the harness's dictionary, which loads synchronously here: the step that loads computes on top of it,
and vLLM computes what failed again, in pages that its own cache has published already.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from stepwell.engines.vllm import connector
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.engines.vllm.hooks.wrapped import maker_of
from stepwell.engines.vllm.scheduler.half import SchedulerHalf
from stepwell.hierarchy.local import LocalWell, open_well

from .build import Setup
from .dict_connector import STORES, DictConnector
from .local import Engine, prompt, setup_in

BLOCK = 16
ALWAYS = {"stepwell": {"recall": "always"}}
PREFIX = 192  # what the other connector has: tokens of `prompt(200)`


class OfAnother(MultiConnector):
    """A subclass, as vLLM's users write them."""


class Parts(Engine):
    """An engine whose connector is made of several, of which ours is the last."""

    @property
    def _ours(self) -> StepwellConnector:
        found = self.connector
        while not isinstance(found, StepwellConnector):
            found = found._connectors[-1]
        return found

    @property
    def half(self) -> SchedulerHalf:
        half = self._ours._sched
        assert half is not None
        return half

    @property
    def client(self) -> Any:
        return self._ours._client


def other(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": DictConnector.__module__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "beside others", "sync": True, **extra},
    }


def ours(setup: Setup) -> dict[str, Any]:
    return {"kv_connector": setup.connector, "kv_role": "kv_both", "kv_connector_extra_config": setup.extra}


def several(folder: Path, *children: dict[str, Any], **fields: Any) -> Setup:
    """An engine with a connector of these and ours."""
    inner = setup_in(folder, **fields)
    parts = [*children, ours(inner)]
    return replace(inner, connector="MultiConnector", extra={"connectors": parts}, load_failure_policy="recompute")


def nested(setup: Setup) -> Setup:
    inner = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": setup.extra}
    return replace(setup, extra={"connectors": [inner]})


SHAPES = {
    "beside another": lambda folder: several(folder, other()),
    "alone in it": several,
    "nested": lambda folder: nested(several(folder, other())),
    "of a subclass": lambda folder: replace(several(folder, other()), connector="OfAnother", module=__name__),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_of_another_connector_is_inert(tmp_path: Path, shape: str, caplog: pytest.LogCaptureFixture) -> None:
    setup = SHAPES[shape](tmp_path)
    with open_well("32MiB") as well, caplog.at_level(logging.DEBUG, "stepwell"):
        with Parts(setup, well) as h:
            inert = [r for r in caplog.records if "inert" in r.getMessage()]
            assert [r.levelno for r in inert if r.levelno > logging.DEBUG] == [logging.ERROR], (
                "one line, of one process"
            )
            assert all("SW-718" in r.getMessage() for r in inert) and len(inert) == 2, "both halves know"
            for seed in (1, 2, 1):
                assert h.right(h.serve(prompt(200, seed=seed), max_tokens=3))
            h.assert_clean()
        assert well.stats()["sessions"] == 0 and not well.hierarchy.index


def test_strict_refuses_to_be_a_part(tmp_path: Path) -> None:
    inner = setup_in(tmp_path, extra={"strict": True})
    setup = replace(inner, connector="MultiConnector", extra={"connectors": [other(), ours(inner)]})
    with open_well("32MiB") as well, pytest.raises(Exception, match="SW-718"):
        Parts(setup, well)


class Subclass(StepwellConnector):
    """Constructed by the engine, whatever its constructor does before ours."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.one_more = StepwellConnector(vllm_config, role, kv_cache_config)


def test_the_engines_only_connector_is_no_part_and_what_it_makes_is(tmp_path: Path) -> None:
    with open_well("32MiB") as well:
        with Engine(setup_in(tmp_path), well) as h:
            assert h.half is not None
        setup = replace(setup_in(tmp_path), connector="Subclass", module=__name__)
        with Engine(setup, well) as h:
            assert h.half is not None and h.connector.one_more._sched is None


def unwrapped(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def called(*given: Any) -> Any:
        return method(*given)

    return called


def wrapped(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return functools.wraps(method)(unwrapped(method))


def maker() -> Any:
    """Of a part that is being constructed by the caller."""
    return maker_of(object.__new__(StepwellConnector))


class Above(MultiConnector):
    def inherited(self) -> Any:
        return maker()


class Making(Above):
    def method(self) -> Any:
        return maker()

    def comprehension(self) -> Any:
        return {way: maker() for way in ("only",)}["only"]

    @wrapped
    def decorated(self) -> Any:
        return maker()

    @unwrapped
    def decorated_without_wraps(self) -> Any:
        return maker()

    @functools.lru_cache  # noqa: B019
    def cached(self) -> Any:
        return maker()

    @property
    def as_property(self) -> Any:
        return maker()

    @functools.cached_property
    def as_cached_property(self) -> Any:
        return maker()

    as_partial = functools.partialmethod(lambda self, _: maker(), 1)


WAYS = [name for kind in (Above, Making) for name in vars(kind) if not name.startswith("_")]


@pytest.mark.parametrize("way", WAYS)
def test_a_connector_that_makes_a_part_is_seen_in_whichever_method_it_does(way: str) -> None:
    making = object.__new__(Making)
    found = getattr(making, way)
    assert (found() if callable(found) else found) is making


def another_like(first: StepwellConnector, setup: Setup, well: LocalWell) -> bool:
    with Engine(setup, well) as h:
        return h.connector._sched is not None


def test_an_engine_that_a_function_makes_when_given_a_connector_is_no_part(tmp_path: Path) -> None:
    with open_well("32MiB") as well:
        with Engine(setup_in(tmp_path), well) as h:
            first = h.connector
        assert another_like(first, setup_in(tmp_path), well)


# --- what others fail to load --------------------------------------------------------------------


@contextmanager
def unseen() -> Iterator[None]:
    """The connector does not see that it is a part."""
    with patch.object(connector, "maker_of", lambda part: None):
        yield


@contextmanager
def failing(folder: Path, well: LocalWell, **fields: Any) -> Iterator[Parts]:
    """An engine whose other connector has a prefix that ours has not, and spoils it when it loads it, and says so."""
    setup = several(folder, other(store=folder.name, fault="spoils and says so"), **fields)
    with unseen(), Parts(setup, well) as h:
        h.serve(prompt(200))
        h.forget()
        well.hierarchy.operator.clear(frozenset({"host"}), b"", lambda said: None)
        well.pump()
        assert not h.entries()
        yield h


def nothing_wrong_is_recalled(folder: Path, well: LocalWell, *prompts: list[int]) -> int:
    """Tokens that an engine with stepwell alone recalls of these; what it reads is checked by the oracle."""
    with Engine(setup_in(folder), well) as h:
        found = [h.recall(tokens, max_tokens=3, kv_transfer_params=ALWAYS) for tokens in prompts]
        assert all(h.right(outcome) for outcome in found)
        h.assert_clean()
        return sum(outcome.external for outcome in found)


LONG = [*prompt(200), *prompt(60, seed=5)]
ORDERS = {"cpu": {}, "runner v2": {"runner_v2": True}, "asynchronous": {"async_scheduling": True, "runner_v2": True}}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_tokens", [32, 256])
def test_what_is_computed_on_top_of_a_failed_load_is_not_spilled(tmp_path: Path, order: str, batch_tokens: int) -> None:
    """In small steps the blocks would be copied before they are computed again."""
    with open_well("32MiB") as well:
        with failing(tmp_path, well, batch_tokens=batch_tokens, **ORDERS[order]) as h:
            assert h.serve(LONG, max_tokens=3).finish_reason == "length"
            assert h.failures, "a load has failed"
        nothing_wrong_is_recalled(tmp_path, well, LONG)


def test_what_hits_such_pages_in_the_engines_cache_is_not_spilled(tmp_path: Path) -> None:
    """They stay published: of a request that has ended before it could compute them again, too."""
    with open_well("32MiB") as well:
        with failing(tmp_path, well, batch_tokens=32) as h:
            first = h.add(LONG)
            h.run_until(lambda: bool(h.failures))
            second = [*prompt(200), *prompt(80, seed=6)]
            h.abort(first)
            outcome = h.serve(second, max_tokens=3)
            assert outcome.local >= PREFIX
        nothing_wrong_is_recalled(tmp_path, well, second)


def test_others_are_spilled_beside_a_failed_load(tmp_path: Path) -> None:
    """Also those that end with that very step, and whatever takes its pages afterwards, or hits what was written there
    then."""
    beside, later = prompt(100, seed=7), prompt(900, seed=8)
    goes_on = [*later, *prompt(100, seed=9)]
    with open_well("32MiB") as well:
        with failing(tmp_path, well) as h:
            h.add(LONG, max_tokens=3)
            h.add(beside)
            h.run()
            assert h.failures
            assert len(h.entries()) == 6
            assert h.serve(later).local == 0
            assert h.serve(goes_on).local == 896
        assert nothing_wrong_is_recalled(tmp_path, well, beside, goes_on) == 96 + 992


def test_such_pages_are_as_good_as_any_once_a_recall_has_filled_them(tmp_path: Path) -> None:
    known = prompt(900, seed=8)
    goes_on = [*known, *prompt(100, seed=9)]
    with open_well("32MiB") as well:
        with failing(tmp_path, well) as h:
            h.serve(known)
            h.serve(LONG)
            assert h.failures
            STORES[tmp_path.name].clear()
            assert h.recall(goes_on, kv_transfer_params=ALWAYS).external == 896
        assert nothing_wrong_is_recalled(tmp_path, well, goes_on) == 992


def test_our_own_failed_load_costs_nothing_but_its_blocks(tmp_path: Path) -> None:
    """Its pages were nobody's to read: what is computed in them afterwards is spilled."""
    with open_well("32MiB") as well, Engine(setup_in(tmp_path), well) as h:
        h.serve(prompt(200))
        h.forget()
        with h.spoiled(3):
            rid, beside = h.add(prompt(200), max_tokens=40), h.add(prompt(100, seed=7))
            h.run()
        assert h.failures and h.right(h.requests[rid]) and h.right(h.requests[beside], "length")
        whole = (200 + 40 - 1) // BLOCK * BLOCK
        tokens = h.chain(rid).output(40)
        assert h.recall([*prompt(200), *tokens], kv_transfer_params=ALWAYS).external == whole
        assert h.recall(prompt(100, seed=7), kv_transfer_params=ALWAYS).external == 96
        h.assert_quiet()
