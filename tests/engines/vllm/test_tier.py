"""Requests of a real scheduler whose offloading has our tier below it: every byte that attention reads is looked at."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from stepwell.client import membership
from stepwell.config.settings import Settings
from stepwell.engines.vllm import plugin
from stepwell.engines.vllm.offloading import opening
from stepwell.engines.vllm.tier import StepwellTier
from stepwell.hierarchy.local import LocalWell, open_threaded
from stepwell.serve.options import judge

from . import local
from .build import Setup
from .harness import Harness
from .local import open_well, prompt, setup_in
from .offloading import Offloading, joining, keys_of, offloading, offloading_setup, patient
from .test_beside_others import LONG, other

KNOWS_SOURCES = find_spec("vllm.v1.metrics.cache_hit_source") is not None
"""vLLM 0.32 counts hits by where they come from."""


@contextmanager
def engine(folder: Path, well: LocalWell, *, rows: int = 64, **fields: Any) -> Iterator[Harness]:
    """One engine on this well, whose CPU tier has fewer rows than two of its prompts have chunks."""
    with joining(well), Harness(offloading_setup(folder, rows=rows, **fields)) as harness:
        yield harness
        assert not harness.wrong_kv and not harness.wrong_tokens


def settle(harness: Harness) -> None:
    """Stores under way have ended."""
    while harness.connector.has_pending_push_work():
        harness.step()


def until(holds: Callable[[], bool]) -> None:
    """Waits for what threads do; the test fails where they do not."""
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def external(harness: Harness, tokens: list[int]) -> int:
    """Tokens that offloading has brought for a prompt that the engine's own prefix cache has forgotten."""
    assert harness.reset_prefix_cache()
    outcome = harness.serve(tokens)
    assert outcome.finish_reason == "length"
    settle(harness)
    return int(outcome.external)


def test_what_the_cpu_tier_has_evicted_is_recalled(tmp_path: Path) -> None:
    prompts = [prompt(401, seed) for seed in range(5)]
    with open_well() as well, engine(tmp_path, well) as harness:
        for tokens in prompts:
            harness.serve(tokens)
            settle(harness)
        assert [external(harness, tokens) for tokens in prompts] == [400] * 5
        if KNOWS_SOURCES:
            assert harness.hits["disk"] >= 1600  # where a tier of storage brings it, vLLM counts it there
        assert well.stats()["recalled_blocks"] >= 100


def test_an_engine_that_starts_again_finds_what_it_had(tmp_path: Path) -> None:
    tokens = prompt(401)
    with open_well() as well:
        with engine(tmp_path, well) as harness:
            harness.serve(tokens)
            settle(harness)
        with engine(tmp_path, well) as harness:
            assert external(harness, tokens) == 400


def test_a_well_that_starts_again_reads_it_from_disk(tmp_path: Path) -> None:
    tokens = prompt(401)
    for life, found in enumerate((0, 400)):
        well = open_threaded("32MiB", home=tmp_path / "home", disk=tmp_path / "disk", disk_size="1GiB")
        with well, patient(), engine(tmp_path, well) as harness:
            assert external(harness, tokens) == found, f"life {life}"


def test_two_engines_share_what_they_store(tmp_path: Path) -> None:
    tokens = prompt(401)
    with open_well() as well, engine(tmp_path, well) as one, engine(tmp_path, well) as other:
        one.serve(tokens)
        settle(one)
        assert external(other, tokens) == 400


def test_many_requests_at_once_on_a_cpu_tier_that_is_too_small(tmp_path: Path) -> None:
    rng = random.Random(3)
    prompts = [prompt(rng.randrange(33, 700), seed) for seed in range(8)]
    with open_well() as well, engine(tmp_path, well, rows=48, num_pages=129) as harness:
        for _ in range(4):
            names = [harness.add(tokens) for tokens in rng.sample(prompts, 6)]
            harness.run()
            settle(harness)
            assert all(harness.requests[name].finish_reason == "length" for name in names)
            harness.reset_prefix_cache()
        well.check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chunk_holds_the_shards_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    prompts = [prompt(201, seed) for seed in range(4)]
    with open_well() as well, engine(tmp_path, well, rows=16 * ranks, ranks=ranks) as harness:
        for tokens in prompts:
            harness.serve(tokens)
            settle(harness)
        assert sum(external(harness, tokens) for tokens in prompts) > 400


def test_a_well_that_is_lost_costs_no_request(tmp_path: Path) -> None:
    prompts = [prompt(401, seed) for seed in range(4)]
    well = open_well()
    with engine(tmp_path, well) as harness:
        for tokens in prompts:
            harness.serve(tokens)
            settle(harness)
        well.close()
        for tokens in prompts:
            external(harness, tokens)


def test_the_disk_keeps_its_size_under_ten_times_as_much(tmp_path: Path) -> None:
    disk, size, chunk = tmp_path / "disk", 128 << 20, 1 << 20
    well = open_threaded("64MiB", home=tmp_path / "home", disk=disk, disk_size=size)
    memory = {"cpu_bytes_to_use": 64 * chunk}
    with well, patient(), offloading(tmp_path, well, rows=64, head_size=2048, extra=memory) as engine:
        assert engine.rows.shape[1] == chunk
        for number in range(10 * size // chunk // 16):
            engine.store(keys_of(f"p{number}", 16), f"s{number}")
            engine.forget()
            assert sum(file.stat().st_size for file in disk.glob("*.seg")) <= size
        newest = keys_of(f"p{number}", 16)
        context = engine.request("r")
        assert engine.hits(newest, context) == 16
        engine.assert_loaded(newest, context)


def test_requests_that_wait_for_room_all_get_their_turn(tmp_path: Path) -> None:
    """Four prompts at once through an arena that may pin a part of one: each is loaded, in rounds."""
    prompts = [keys_of(f"p{number}", 12) for number in range(4)]
    well = open_threaded("64MiB", home=tmp_path / "home", disk=tmp_path / "disk", disk_size="1GiB")
    memory = {"cpu_bytes_to_use": 96 << 22}
    with well, patient(), offloading(tmp_path, well, rows=96, head_size=8192, extra=memory) as engine:
        assert engine.rows.shape == (96, 4 << 20)
        for number, keys in enumerate(prompts):
            engine.store(keys, f"s{number}")
        engine.forget()
        contexts = [engine.request(f"r{number}") for number in range(4)]
        found: list[int | None] = [None] * 4
        for _ in range(100_000):
            for number, (keys, context) in enumerate(zip(prompts, contexts, strict=True)):
                if found[number] is None:
                    found[number] = engine.look(keys, context)
            engine.step()
            if None not in found:
                break
            time.sleep(0.0005)
        assert found == [12] * 4
        for keys, context in zip(prompts, contexts, strict=True):
            engine.assert_loaded(keys, context)


def test_a_well_that_is_started_is_a_window_and_one_that_runs_keeps_its_settings(tmp_path: Path) -> None:
    started: list[dict[str, Any]] = []

    def dialler(wanted: Any) -> Any:
        started.append(wanted.options)
        return lambda: well.dial

    with open_well() as well, joining(well), patch.object(StepwellTier, "dialler", staticmethod(dialler)):
        engine = Offloading(tmp_path, tier={"disk": f"{tmp_path}:1GiB"})
        session = engine.tier._session
        assert session is not None and session.client._options == {"disk": f"{tmp_path}:1GiB"}
        engine.close()
    own = {"host": "256MiB", "disk_queue": "256MiB"}
    assert started == [{"disk": f"{tmp_path}:1GiB", **own}] * 2


# --- what a user may get wrong ----------------------------------------------------------------------------------------


def _inert(caplog: pytest.LogCaptureFixture, code: str) -> str:
    lines = [r.getMessage() for r in caplog.records if r.name == "stepwell" and code in r.getMessage()]
    assert len(lines) == 1, [r.getMessage() for r in caplog.records]
    return lines[0]


def _serves(engine: Offloading) -> bool:
    keys = keys_of("a", 3)
    engine.store(keys)
    engine.forget()
    return engine.hits(keys, engine.request("r")) == 3


@pytest.mark.parametrize(
    ("tier", "code", "says"),
    [
        ({"block_tokens": 64}, "SW-102", "vLLM's block_size"),
        ({"weights_id": 7}, "SW-102", "secondary_tiers: weights_id"),
        ({"locality": "local"}, "SW-102", "LOCAL and REMOTE"),
        ({"disk_sise": {}}, "SW-102", "disk_sise"),
    ],
)
def test_a_key_that_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: dict[str, Any], code: str, says: str
) -> None:
    with caplog.at_level(logging.INFO), offloading(tmp_path, tier=tier) as engine:
        assert not _serves(engine)
    assert says in _inert(caplog, code)


def test_a_start_that_fails_late_leaves_no_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = patch("stepwell.engines.vllm.tier.RowTransfers", side_effect=RuntimeError("can't start new thread"))
    with caplog.at_level(logging.INFO), open_well() as well, refused, offloading(tmp_path, well) as engine:
        assert not _serves(engine)
        assert well.stats()["sessions"] == 0
    (line,) = [r.getMessage() for r in caplog.records if "inert" in r.getMessage()]
    assert line.endswith("can't start new thread")


def test_strict_refuses_to_start(tmp_path: Path) -> None:
    with open_well() as well, pytest.raises(Exception, match="SW-102"), joining(well):
        Offloading(tmp_path, tier={"strict": True, "block_tokens": 64})


def test_the_tier_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one is inert, so the first one serves."""
    twice = {"secondary_tiers": [{"type": "stepwell", "home": str(tmp_path), "weights_id": "w"}] * 2}
    with caplog.at_level(logging.INFO), open_well() as well, offloading(tmp_path, well, extra=twice) as engine:
        assert _serves(engine)
    assert "more than once" in _inert(caplog, "SW-110")


def _part(setup: Setup) -> dict[str, Any]:
    return {"kv_connector": setup.connector, "kv_role": "kv_both", "kv_connector_extra_config": setup.extra}


@pytest.mark.parametrize("doors", [1, 2])
def test_a_part_of_another_connector_has_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture, doors: int) -> None:
    """vLLM's offloading stores what was computed on top of a load of another part that has failed, and so would the
    well. With the other door in the same engine, both are inert, with a line each."""
    below = offloading_setup(tmp_path, rows=64)
    parts = [other(store=tmp_path.name, fault="spoils and says so"), _part(below)]
    parts += [_part(setup_in(tmp_path))] * (doors - 1)
    made = replace(below, connector="MultiConnector", extra={"connectors": parts})
    with caplog.at_level(logging.INFO), open_well() as well, local.joining(well), joining(well), Harness(made) as h:
        for tokens in (prompt(200), LONG):  # the second one begins as the first
            external(h, tokens)
        assert h.failures
        assert well.stats()["sessions"] == 0 and not well.hierarchy.index
    lines = [r.getMessage() for r in caplog.records if r.name == "stepwell"]
    assert len(lines) == doors and all("MultiConnector" in line and "SW-718" in line for line in lines)


@pytest.mark.parametrize(
    ("algorithm", "seed", "warned"), [("xxhash", None, 1), ("xxhash", "0", 0), ("sha256_cbor", None, 0)]
)
def test_hashes_that_differ_from_start_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str, seed: str | None, warned: int
) -> None:
    def change(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = algorithm

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    with patch.dict(os.environ, environment, clear=True), caplog.at_level(logging.INFO), open_well() as well:
        with offloading(tmp_path, well, change=change) as engine:
            assert _serves(engine)
        assert well.stats().get("engine_cold_restarts", 0) == warned
    told = [record for record in caplog.records if "SW-408" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * warned
    assert all("PYTHONHASHSEED" in record.getMessage() for record in told)


def test_adapters_leave_the_tier_inert(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), offloading(tmp_path, lora=True) as engine:
        assert not _serves(engine)
    assert "adapter" in _inert(caplog, "SW-712")


def test_a_row_that_the_well_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = {"cpu_bytes_to_use": 64 << 20}
    with (
        caplog.at_level(logging.INFO),
        open_well("2MiB") as well,
        offloading(tmp_path, well, rows=16, head_size=8 << 10, extra=rows) as engine,
    ):
        assert engine.rows.shape[1] > 2 << 20
        assert not _serves(engine)
    assert "cannot hold" in _inert(caplog, "SW-107")


def test_a_row_that_no_well_can_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), patch.object(opening, "MAX_PAYLOAD", 4095), offloading(tmp_path) as engine:
        assert not _serves(engine)
    assert "block_size" in _inert(caplog, "SW-102")


def test_a_misspelt_setting_of_the_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), open_well() as well:
        well.hierarchy._members.follow(judge(Settings()))  # as a well of its own process does
        with offloading(tmp_path, well, tier={"hots": "1GiB"}) as engine:
            assert not _serves(engine)
    assert "did you mean host?" in _inert(caplog, "SW-101")


def test_a_vllm_that_does_not_tell_its_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = patch.object(opening, "find_in_callers", lambda kind: None)
    with caplog.at_level(logging.INFO), hidden, offloading(tmp_path) as engine:
        assert not _serves(engine)
    assert "VllmConfig" in _inert(caplog, "SW-710")


def test_a_well_that_is_lost_for_good_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine tries to join again and again, and serves."""
    tokens, tries = prompt(401), [0]

    def find() -> Any:
        tries[0] += 1
        return well.dial

    with open_well() as well, joining(well), caplog.at_level(logging.INFO), ExitStack() as stack:
        stack.enter_context(patch.object(StepwellTier, "dialler", staticmethod(lambda wanted: find)))
        stack.enter_context(patch.object(StepwellTier, "threaded", True))
        stack.enter_context(patch.object(membership, "LONGEST_WAIT", 0.01))
        h = stack.enter_context(Harness(offloading_setup(tmp_path, rows=64)))
        until(lambda: well.stats()["sessions"] == 1)
        h.serve(tokens)
        settle(h)
        well.close()
        before = tries[0]
        until(lambda: tries[0] > before + 6)
        for seed in range(3):
            external(h, prompt(401, seed))
        assert not h.wrong_kv and not h.wrong_tokens
    lines = [r.getMessage() for r in caplog.records if r.levelno > logging.INFO and r.name == "stepwell"]
    assert len(lines) == 1 and "SW-505" in lines[0], lines


def test_it_is_known_by_name_where_vllm_takes_tiers() -> None:
    plugin.register()
    plugin.register()
    tier = SecondaryTierFactory.get_tier_class({"type": "stepwell"})
    by_path = {"type": plugin.TIER_CLASS, "module_path": "stepwell.engines.vllm.tier"}
    assert SecondaryTierFactory.get_tier_class(by_path) is tier


def test_a_vllm_without_the_interface_has_the_connector_all_the_same() -> None:
    with patch.dict("sys.modules", {"vllm.v1.kv_offload.tiering.factory": None}):
        plugin.register()
