"""What commands say of models with several cache groups: what they keep, and why a request is a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

import json

from typer.testing import CliRunner

from stepwell.block.digest import Chain
from stepwell.cli.commands import app
from stepwell.cli.explain import told
from stepwell.client import control
from stepwell.engines.vllm.scheduler.tails import tail_digests
from stepwell.protocol.messages import DecisionRow, DecisionsQuery, NamespaceRow, PlaceRow
from stepwell.serve.server import admin
from stepwell.units import format_size

from .build import STATE
from .local import Engine, engine, prompt

WINDOW: dict[str, Any] = {"layers": 2, "windows": (40, 0), "num_pages": 257, "max_model_len": 600}
STATES: dict[str, Any] = {**WINDOW, "layers": 4, "windows": (STATE, STATE, STATE, 0)}


def decisions(h: Engine) -> list[DecisionRow]:
    """The latest first."""
    answers: list[Any] = []
    admin.decisions(h.well.hierarchy, DecisionsQuery(50), answers.append)
    return answers[0].rows


def namespaces(h: Engine) -> list[NamespaceRow]:
    answers: list[Any] = []
    admin.namespaces(h.well.hierarchy, answers.append)
    h.well.pump()
    return answers[0].rows


def test_a_window_is_joined_to_the_prefix_that_it_goes_with(tmp_path: Path) -> None:
    with engine(tmp_path, **WINDOW) as h:
        h.serve(prompt(200))
        assert h.recall(prompt(200)).external == 192
        tail, prefix = decisions(h)
        assert prefix.prefix is None and tail.prefix == prefix.number
        assert (prefix.recalled, prefix.no_place, tail.recalled) == (12, None, 3)
        whose = f"the prefix of #{prefix.number}"
        assert told(tail).startswith(f"#{tail.number}: the window or state that goes with {whose}")
        assert "\n  outcome: 3 blocks came" in told(tail)
        assert tail.regret_s is None, "it is no choice of its own"
        assert (h.stat("requests"), h.stat("hits"), h.stat("decided_always")) == (2, 12, 1)
        assert (h.stat("tail_requests"), h.stat("tail_hits"), h.stat("tail_misses")) == (1, 3, 0)


@pytest.mark.parametrize(("fields", "name"), [(WINDOW, "sliding_window of 40"), (STATES, "recurrent")])
def test_where_prompts_part_it_is_said_what_is_missing(tmp_path: Path, fields: dict[str, Any], name: str) -> None:
    shared = prompt(320)
    with engine(tmp_path, **fields) as h:
        h.serve([*shared, *prompt(200, seed=2)])
        assert h.recall([*shared, *prompt(200, seed=3)]).external == 0
        assert h.counted("missed_no_window") == 1
        (row,) = decisions(h)
        assert row.no_place == PlaceRow(20, 20, 0, [(name, 20)])
        assert (row.gave_up, row.regret_s) == ("no_place", None)
        assert (h.stat("gave_up_no_place"), h.stat("gave_up_limit")) == (1, 0)
        said = told(row)
        assert "the prefix is there for 20 blocks, but a window or a state is not" in said
        assert f"something is missing of {name} at 20 of the last 20 places" in said
        assert "where prompts have parted, as now behind block 20" in said
        third = h.recall([*shared, *prompt(200, seed=4)])
        assert third.external == (320 if fields is WINDOW else 0), "no step has ended there"
        assert (decisions(h)[0].no_place is None) == (fields is WINDOW)


def test_a_place_before_the_end_of_the_prefix_is_said_to_be_one(tmp_path: Path) -> None:
    longer = [*prompt(200), *prompt(100, seed=2)]
    with engine(tmp_path, **WINDOW) as h:
        h.serve(prompt(200))
        assert h.recall(longer).external == 192
        chain, (tail,) = Chain(16), h.half._shape.tail
        chain.extend(longer)
        h.client.forget(h.client.session, tail_digests(chain, [(17, tail)]), 0)
        assert h.recall(longer).external == 192
        prefix = next(row for row in decisions(h) if row.prefix is None)
        assert prefix.recalled == 12 and prefix.gave_up == "no_place" and prefix.no_place is not None
        assert (prefix.no_place.blocks, prefix.no_place.places) == (18, 6), "those behind the place that was found"
        assert prefix.no_place.missing == [("sliding_window of 40", 6)]


def test_places_that_were_asked_for_and_had_gone_are_counted(tmp_path: Path) -> None:
    """Of two layers' windows the second is stored behind the first, and only that one is looked for."""
    with engine(tmp_path, **{**WINDOW, "layers": 3, "windows": (40, 40, 0)}) as h:
        h.serve(prompt(200))
        chain, (first, _) = Chain(16), h.half._shape.tail
        chain.extend(prompt(200))
        h.client.forget(h.client.session, tail_digests(chain, [(11, first)]), 0)
        assert h.recall(prompt(200)).external == 0
        tail, prefix = decisions(h)
        assert prefix.no_place is not None and prefix.no_place.tried == 1
        assert prefix.no_place.missing == [("sliding_window of 40", 11)]
        assert tail.prefix == prefix.number and h.stat("tail_misses") > 0 and h.stat("gave_up_limit") == 0


def test_windows_are_worth_what_the_prefix_before_them_is(tmp_path: Path) -> None:
    with engine(tmp_path, **WINDOW) as h:
        h.serve(prompt(200), max_tokens=30)
        tails = sorted(entry.history.depth for entry in h.entries() if entry.position < 0)
        assert tails == [9, 9, 9, 12, 13], "behind the prompt, and behind each block of the answer"


def test_namespaces_say_what_each_group_keeps(tmp_path: Path) -> None:
    with engine(tmp_path, layers=6, windows=(33, 33, 33, 33, 33, 0), num_pages=257, max_model_len=600) as h:
        h.serve(prompt(200))
        rows, shard = namespaces(h), h.half._shape.shard_bytes
        (row,) = rows
        assert [(g.name, g.layers, g.resume_bytes) for g in row.groups] == [
            *[("sliding_window of 33", 1, 2 * shard)] * 5,
            ("full", 1, 0),
        ]
        with patch.object(control, "namespaces", lambda *_, **__: rows):
            said = CliRunner().invoke(app, ["cache", "namespaces", "--home", str(tmp_path)])
            told = CliRunner().invoke(app, ["cache", "namespaces", "--json", "--home", str(tmp_path)])
        assert f"    sliding_window of 33: 5 layers, {format_size(10 * shard)} where a request goes on\n" in said.output
        assert f"    full: 1 layer, {format_size(shard // 16)} a token\n" in said.output
        assert json.loads(told.output)["namespaces"][0]["groups"][-1]["token_bytes"] == shard // 16
