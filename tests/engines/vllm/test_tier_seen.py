"""What people see of a well below vLLM's offloading: vLLM's metrics and events, and what commands say of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_offload.base import Medium, OffloadingEvent
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from stepwell.cli.cache import identities
from stepwell.cli.explain import told
from stepwell.cli.output import stats_table
from stepwell.hierarchy.local import LocalWell, open_threaded
from stepwell.ops.checks import offloading as checks
from stepwell.protocol.messages import DecisionsQuery, NamespaceRow
from stepwell.serve.server import admin

from .harness import Harness
from .local import Engine, open_well, prompt, setup_in
from .offloading import joining, keys_of, offloading, offloading_setup, patient

TIER = "1:stepwell"


class Exposed:
    """The engine's /metrics, fed with what its scheduler has said, over the wire between vLLM's processes."""

    def __init__(self, config: Any) -> None:
        unregister_vllm_metrics()
        self._prom = KVConnectorProm(config, ["engine"], {0: ["0"]})

    def observe(self, data: dict[str, Any]) -> None:
        said = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=data))
        heard = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(said)).scheduler_stats
        assert heard is not None and heard.kv_connector_stats is not None
        self._prom.observe(heard.kv_connector_stats)

    def of_tier(self, name: str) -> dict[str, float]:
        """Values of a counter that have our tier's label, by what their other label says."""
        return {
            sample.labels.get("reason") or sample.labels.get("kind") or "": sample.value
            for family in text_string_to_metric_families(generate_latest(REGISTRY).decode())
            for sample in family.samples
            if sample.name == f"vllm:kv_offload_{name}_total" and sample.labels.get("tier") == TIER
        }


def test_vllms_metrics_count_what_our_tier_does(tmp_path: Path) -> None:
    prompts = [prompt(401, seed) for seed in range(4)]
    with open_well() as well, joining(well), Harness(offloading_setup(tmp_path, rows=64)) as h:
        metrics = Exposed(h.config)
        for tokens in [*prompts, *prompts]:
            assert h.reset_prefix_cache()
            h.serve(tokens)
            while h.connector.has_pending_push_work():
                h.step()
        h.step()
        for data in h.connector_stats:
            metrics.observe(data)
        seen = well.stats()
        assert metrics.of_tier("tiering_read_bytes") == {"": seen["recalled_bytes"]}
        assert metrics.of_tier("tiering_write_bytes") == {"": seen["spilled_bytes"]}
        assert metrics.of_tier("tiering_chunk_hits")[""] == seen["recalled_blocks"] > 0
        assert metrics.of_tier("stepwell_misses") == {"never_seen": len(prompts)}
        assert metrics.of_tier("stepwell_errors") == {}


def test_chunks_that_are_not_loaded_are_counted_for_our_tier(tmp_path: Path) -> None:
    keys = keys_of("a", 5)
    with open_well() as well, offloading(tmp_path, well) as engine:
        engine.store(keys)
        engine.forget()
        for entry in list(well.hierarchy.index.values())[2:4]:
            slab, slot = entry.slots[0]
            slab.renew(slot)
        engine.hits(keys, engine.request("r"))
        metrics = Exposed(engine.config)
        metrics.observe(engine.manager.get_stats().data)
        assert metrics.of_tier("stepwell_errors") == {"failed_load": 2}
        assert metrics.of_tier("tiering_promotion_job_failures") == {"": 1}
        session = engine.tier._session
        assert session is not None
        session.client.report(idle=True)
        assert well.stats()["engine_failed_loads"] == 2


@pytest.mark.parametrize(("wanted", "published"), [(True, True), (False, True), (True, False)])
def test_events_say_what_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: bool, published: bool
) -> None:
    """Where both vLLM publishes events and the tier's `enable_kv_events` asks for them: once for each chunk. Where only
    the tier does, one line says what is lacking."""
    keys = keys_of("a", 3)

    def publish(config: Any) -> None:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=published)

    with offloading(tmp_path, tier={"enable_kv_events": wanted, "locality": "LOCAL"}, change=publish) as engine:
        engine.store(keys)
        events = [event for event in engine.manager.take_events() if event.medium is Medium.STORAGE]
        stored = Counter(key for event in events for key in event.keys)
        assert stored == (Counter(keys) if wanted and published else Counter())
        assert all(isinstance(e, OffloadingEvent) and not e.removed and e.locality is not None for e in events)
        assert not list(engine.manager.take_events())
    assert ("enable_kv_events of the tier has no effect" in caplog.text) is (wanted and not published)


# --- commands ---------------------------------------------------------------------------------------------------------


def _namespaces(well: LocalWell) -> list[NamespaceRow]:
    answers: list[Any] = []
    admin.namespaces(well.hierarchy, answers.append)
    well.pump()
    return answers[0].rows


def test_the_door_is_named_where_it_keeps_an_engine_from_stored_blocks(tmp_path: Path) -> None:
    with open_well() as well, Engine(setup_in(tmp_path), well) as connector:
        connector.serve(prompt(100))
        with offloading(tmp_path, well) as below:
            assert below.hits(keys_of("a", 1), below.request("r")) == 0
            first = stats_table(well.hierarchy.figures()).splitlines()[0]
            assert first.endswith("2 session(s): model, model (below vLLM's offloading)")
            (line,) = identities(_namespaces(well))
        assert line.startswith("model (below vLLM's offloading) finds nothing in ")
        assert line.endswith("which holds 6 blocks: door: vllm secondary tier here, StepwellConnector there")


def test_a_long_name_of_a_model_leaves_room_for_the_door(tmp_path: Path) -> None:
    setup = replace(offloading_setup(tmp_path, rows=16), model_dir=tmp_path / ("m" * 60))
    with open_well() as well, joining(well), Harness(setup):
        assert well.stats()["engines"] == "m" * 38 + " (below vLLM's offloading)"


def test_a_decision_says_that_nothing_is_known_of_the_engine(tmp_path: Path) -> None:
    keys = keys_of("a", 3)
    for number, found in enumerate((0, 3)):
        well = open_threaded("64MiB", home=tmp_path / "home", disk=tmp_path / "disk", disk_size="1GiB")
        with well, patient(), offloading(tmp_path, well) as engine:
            assert engine.hits(keys, engine.request("r")) == found
            engine.store(keys, f"s{number}")
            answers: list[Any] = []
            admin.decisions(well.hierarchy, DecisionsQuery(1), answers.append)
    (row,) = answers[0].rows
    said = told(row)
    assert "of which 48 could be recalled (blocks: 3 in disk)" in said
    assert "decided: recall 3 blocks; what computing costs is not known (below vLLM's offloading it never is)" in said


def test_files_that_a_killed_engine_leaves_are_found_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 15: with vLLM's own region, whose file a clean exit deletes. Other engines may have left files before."""
    monkeypatch.setattr(checks, "_NAMED", 1 << 20)
    name = f"stepwell-test-{os.getpid()}"
    ready, told_ready = os.pipe()
    child = os.fork()
    if child == 0:
        SharedOffloadRegion(name, 4, None, 1 << 20, 1 << 20)
        os.write(told_ready, b"1")
        signal.pause()
        os._exit(1)
    path = f"/dev/shm/vllm_offload_{name}.mmap"
    try:
        os.read(ready, 1)
        (check,) = checks.leftovers()
        assert path not in check.fix
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        (check,) = checks.leftovers()
        assert check.status == "warn" and path in check.fix and int(check.facts["bytes"]) >= 4 << 20
        assert os.path.exists(path)
    finally:
        os.unlink(path)
        os.close(ready)
        os.close(told_ready)
