"""The replay of models that keep windows or states, beside the one of models that do not, and a plain model of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import seconds, trace_of, traces
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.errors import ConfigError
from stepwell.policies.catalog import POLICIES
from stepwell.simulate.groups.model import ModelGroups, model_groups
from stepwell.simulate.groups.replay import GroupsReplay
from stepwell.simulate.replay import Replay
from stepwell.simulate.traces.trace import Trace

WINDOW = ModelGroups(16, ((33, 80),))
"""Two blocks of 16 tokens behind a place, each of the size of five blocks of the prefix."""

STATE = ModelGroups(16, (), (128,))
"""Half a block of the prefix."""


def replayed(trace: Trace, model: ModelGroups, capacity: int, policy: str = "lru") -> GroupsReplay:
    return GroupsReplay(trace, model, POLICIES[policy](), capacity, seconds)


@given(traces(), st.integers(0, 12))
def test_a_model_without_windows_is_a_plain_one_that_computes_its_last_token(trace: Trace, capacity: int) -> None:
    plain = Replay(trace, POLICIES["lru"](), capacity, seconds).run()
    last = np.maximum(0, trace.inputs - 1) // trace.block_tokens
    whole = bool((trace.inputs // trace.block_tokens >= np.diff(trace.starts)).all())
    if whole and not trace.outputs.any():
        ran = replayed(trace, ModelGroups(16), capacity).run()
        assert ran.hits.tolist() == np.minimum(plain.hits, last).tolist()
        assert ran.prefixes.tolist() == plain.hits.tolist()
        assert ran.stored_bytes == plain.entered * 16 * trace.block_tokens


@given(traces(), st.integers(0, 40), st.sampled_from([WINDOW, STATE]), st.sampled_from(sorted(POLICIES)))
def test_no_more_is_held_than_there_is_room_for(trace: Trace, capacity: int, model: ModelGroups, policy: str) -> None:
    replay = replayed(trace, model, capacity, policy)
    for i, time in enumerate(trace.times.tolist()):
        replay.store.begin(time)
        hit, reach = replay.request(i)
        held = [part for part in replay.store.parts.values() if part.held]
        assert hit <= reach
        assert sum(part.size for part in held) == replay.store.held <= replay.store._capacity
        assert sum(part.size for part in held if part.is_tail) == replay.store.held_tails
        assert all(part.parent is None or part.parent.held for part in held), "closed under prefixes"
        children = [part.parent for part in held if part.parent is not None]
        assert all(part.children == sum(parent is part for parent in children) for part in held)


def prompts(*paths: list[int]) -> Trace:
    return trace_of(paths)


def test_where_prompts_part_a_window_is_there_for_the_third_and_no_state() -> None:
    trace = prompts([0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 2, 7, 8], [0, 1, 2, 9, 10])
    ran = replayed(trace, WINDOW, 1000).run()
    assert (ran.hits.tolist(), ran.prefixes.tolist()) == ([0, 0, 3, 3], [0, 3, 3, 3])
    assert replayed(trace, STATE, 1000).run().hits.tolist() == [0, 0, 0, 0]


def test_a_window_that_was_evicted_makes_its_prefix_a_miss() -> None:
    """A prefix takes 4, and its windows 15: those of two prompts leave no room for a third."""
    trace = prompts([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3])
    assert replayed(trace, WINDOW, 100).run().hits[-1] == 3
    ran = replayed(trace, WINDOW, 44).run()
    assert ran.hits[-1] == 0


@pytest.mark.parametrize(
    ("full", "windows", "states", "policies", "says"),
    [
        (None, ["1024:1KiB"], [], ["lru"], "a window or a state cannot be simulated"),
        (None, [], ["1KiB"], ["lru"], "a window or a state cannot be simulated"),
        ("20KiB", ["1024"], [], ["lru"], "a window of '1024'"),
        ("20KiB", ["wide:1KiB"], [], ["lru"], "a window of 'wide:1KiB'"),
        ("20KiB", ["0:1KiB"], [], ["lru"], "a window of '0:1KiB'"),
        ("0", [], [], ["lru"], "a size of '0'"),
        ("20KiB", [], ["much"], ["lru"], "a size of 'much'"),
        ("20KiB", [], [], ["lru", "opt"], "the policy opt cannot be simulated"),
    ],
)
def test_what_is_no_model(
    full: str | None, windows: list[str], states: list[str], policies: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match="SW-138") as raised:
        model_groups(full, windows, states, policies)
    assert says in str(raised.value)


def test_sizes_have_a_common_unit() -> None:
    model = model_groups("20KiB", ["1024:116KiB"], ["6MiB"], ["lru"])
    assert model == ModelGroups(20 << 10, ((1024, 116 << 10),), (6 << 20,))
    assert model.sizes(512) == (5, [29, 3])
    assert ModelGroups(1 << 20, (), (8 << 20,)).sizes(512) == (64, [1]), "as small as can be told apart"
    with pytest.raises(ConfigError, match="SW-138"):
        ModelGroups(1 << 20, (), (1,)).sizes(512)


def test_the_command_says_what_windows_take() -> None:
    how = ["--policy", "lru", "--capacity-tokens", "10%", "--processes", "1"]
    kept = ["--full", "20KiB", "--window", "1024:100KiB"]
    told = CliRunner().invoke(app, ["simulate", "zipf:requests=200", *how, *kept, "--json"])
    (row,) = json.loads(told.output)["rows"]
    assert row["hit_tokens_ratio"] <= row["groups"]["prefix_tokens_ratio"]
    assert 0 < row["groups"]["tail_share"] < 1
    assert 0 < row["groups"]["spilled_tail_bytes"] < row["groups"]["spilled_bytes"]
    said = CliRunner().invoke(app, ["simulate", "zipf:requests=200", *how, *kept]).output
    assert "by prefixes alone; windows and states take" in said
    plain = CliRunner().invoke(app, ["simulate", "zipf:requests=200", *how, "--json"])
    assert "groups" not in json.loads(plain.output)["rows"][0]
