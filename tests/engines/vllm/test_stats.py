"""What the engine's own /metrics and log say of stepwell, through vLLM's own classes on the way."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from stepwell.client.patience import Patience
from stepwell.engines.common.counts import FAMILIES, Tally
from stepwell.engines.common.plan import StepReport
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.engines.vllm.hooks import stats
from stepwell.engines.vllm.hooks.stats import MAX_VALUES, EngineStats

from .local import Engine, engine, open_well, prompt, setup_in
from .test_recall import replace_more

LABELS = ["model_name", "engine"]


def total(h: Engine) -> dict[str, Any]:
    """What vLLM's loggers were given since the engine began, added up."""
    sums: dict[str, Any] = {}
    for data in h.connector_stats:
        for key, n in data.items():
            sums[key] = sums.get(key, 0) + n
    return sums


@pytest.mark.parametrize(("ranks", "page"), [(1, 16), (2, 16), (1, 32)])
def test_what_was_spilled_and_recalled_is_counted_to_the_byte(tmp_path: Path, ranks: int, page: int) -> None:
    with engine(tmp_path, ranks=ranks, page=page) as h:
        h.serve(prompt(320))
        h.recall(prompt(320))
        counts = total(h)
        blocks = h.stat("spilled_blocks")
        assert (blocks, counts["transfer_bytes/spill"]) == (320 // page, h.stat("spilled_bytes"))
        assert counts["recalled_tokens/host"] == 320
        assert counts["recalls/"] == 1
        assert counts["transfer_bytes/recall"] == h.stat("recalled_bytes") > 0
        assert 0 < counts["recall_seconds/"] < 60
        assert counts["misses/never_seen"] == 1
        assert not any(key.startswith("errors/") for key in counts)


def test_the_sums_are_those_of_the_receipts(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        h.serve(prompt(300, seed=2))
        h.forget()
        ids = [h.add(prompt(100)), h.add(prompt(300, seed=2) + prompt(50, seed=3)), h.add(prompt(90, seed=4))]
        h.run()
        receipts = [(h.requests[rid].kv_transfer_params or {})["stepwell"] for rid in ids]
        counts = total(h)
        assert counts["recalled_tokens/host"] == sum(r["recalled_tokens"] for r in receipts) == 96 + 288
        assert counts["recalls/"] == 2
        assert counts["recall_seconds/"] == pytest.approx(sum(r["recall_ms"] for r in receipts) / 1e3, abs=1e-3)
        assert counts["misses/never_seen"] == 2 + 2, "a prefix of which the well had less than was asked for"


def test_an_engine_hit_is_neither_a_recall_nor_a_miss(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(96))
        for entry in reversed(h.entries()):
            h.well.hierarchy.arena.drop(entry, "evicted")
        before = total(h)
        assert h.serve([*prompt(96), 1]).local == 96
        assert {k: n for k, n in total(h).items() if k != "transfer_bytes/spill"} == {
            k: n for k, n in before.items() if k != "transfer_bytes/spill"
        }


def test_why_the_well_was_not_asked_or_late_is_a_miss_too(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"block_tokens": 64}) as h:
        h.serve(prompt(63))
        h.serve(prompt(100))
        h.forget()
        h.client._patience = Patience(stall_s=0.02, total_s=0.1)
        found = h.client._found
        h.client._found = lambda message: found(replace_more(message))
        h.serve(prompt(100))
        counts = total(h)
        assert {key: n for key, n in counts.items() if key.startswith("misses/")} == {
            "misses/short_prompt": 1,
            "misses/never_seen": 1,
            "misses/too_slow": 1,
        }


def test_a_late_answer_is_one_miss_however_long_the_request_waits_for_pages(tmp_path: Path) -> None:
    with engine(tmp_path, num_pages=41, max_seqs=4) as h:
        h.serve(prompt(400))
        h.forget()
        h.client._patience = Patience(stall_s=0.0, total_s=0.0)
        found = h.client._found
        h.client._found = lambda message: found(replace_more(message))
        h.add(prompt(200, seed=2), max_tokens=100)
        h.add(prompt(200, seed=3), max_tokens=100)
        h.step()
        before = h.counted("missed_too_slow")
        h.add(prompt(400))
        for _ in range(10):
            h.step()
        assert h.counted("missed_too_slow") == before
        h.run()
        assert h.counted("missed_too_slow") == before + 1


def test_failed_loads_bring_no_tokens_and_are_errors(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(100))
        h.forget()
        spilled = h.stat("spilled_bytes")
        with h.spoiled(2):
            seen = h.serve(prompt(100))
        assert h.right(seen)
        counts = total(h)
        assert counts["errors/failed_load"] == 1
        assert counts["recalled_tokens/host"] == 32, "those before the bad block"
        assert counts["transfer_bytes/recall"] == spilled // 6 * 2


def test_an_exception_in_a_hook_is_counted(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.half.matched = None  # type: ignore[assignment, method-assign]
        assert h.right(h.serve(prompt(100)))
        assert total(h)["errors/hook"] >= 1


def test_a_tally_that_cannot_be_taken_costs_nothing(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.connector._tally.take = None
        assert h.right(h.serve(prompt(100)))
        assert h.connector.get_kv_connector_stats() is None
        h.assert_quiet()


def test_steps_without_news_carry_nothing(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(20), max_tokens=200)
        assert len(h.connector_stats) < 40 < h.steps


def test_reports_of_ranks_add_up() -> None:
    both = StepReport(recalled_bytes=1, spilled_bytes=10).aggregate(StepReport(recalled_bytes=2, spilled_bytes=20))
    both = pickle.loads(pickle.dumps(both))
    assert (both.recalled_bytes, both.spilled_bytes) == (3, 30)


# through vLLM ---------------------------------------------------------------------------------------------------------


def carried(data: dict[str, Any] | None) -> dict[str, Any]:
    """As it arrives in the process that serves /metrics."""
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=data))
    back = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert back.scheduler_stats is not None
    assert back.scheduler_stats.kv_connector_stats is not None
    return back.scheduler_stats.kv_connector_stats


def exposed() -> dict[tuple[str, ...], float]:
    """Our samples in the registry: name and label values."""
    return {
        (s.name, *(value for name, value in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(generate_latest(REGISTRY).decode())
        for s in family.samples
        if s.name.startswith("stepwell_") and s.name.endswith("_total")
    }


def test_what_the_scheduler_says_arrives_in_metrics_and_log(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        prom = KVConnectorProm(h.config, LABELS, {0: ["m", "0"], 1: ["m", "1"]})
        logging = KVConnectorLogging(h.config.kv_transfer_config)
        begun = exposed()
        assert begun["stepwell_engine_recalled_tokens_total", "0", "m", "host"] == 0
        assert begun["stepwell_engine_recalls_total", "1", "m"] == 0
        h.serve(prompt(100))
        h.recall(prompt(100))
        for data in h.connector_stats:
            prom.observe(carried(data), 1)
            logging.observe(carried(data))
        samples = exposed()
        assert samples["stepwell_engine_recalled_tokens_total", "1", "m", "host"] == 96
        assert samples["stepwell_engine_transfer_bytes_total", "1", "m", "recall"] == h.stat("recalled_bytes")
        assert samples["stepwell_engine_missed_requests_total", "1", "m", "never_seen"] == 1
        assert samples["stepwell_engine_misses_total", "1", "m", "never_seen"] == 1, "the old name"
        assert samples["stepwell_engine_recalled_tokens_total", "0", "m", "host"] == 0
        lines: list[str] = []
        logging.log(lambda text, *args: lines.append(text % args))
        logging.log(lambda text, *args: lines.append(text % args))
        assert len(lines) == 1, "an interval with nothing in it says nothing"
        assert "recalled tokens=96" in lines[0] and "spill MB=" in lines[0]


def test_another_engine_of_the_same_process_registers_again(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        for _ in range(2):
            prom = KVConnectorProm(h.config, LABELS, {0: ["m", "0"]})
            prom.observe({"recalls/": 2})
            assert exposed()["stepwell_engine_recalls_total", "0", "m"] == 2


def test_nothing_strange_raises_into_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path) as h:
        prom = KVConnectorProm(h.config, LABELS, {0: ["m", "0"]})
        before = exposed()
        strange: Any
        for strange in ({}, {"recalls/": "x"}, {1: 2}, {"unheard/of": 1}, {"recalls/": -1}, None, [3]):
            prom.observe(strange)
        prom.observe({"recalls/": 1}, 7)
        assert exposed() == before
        for strange in (None, {}, {"recalls/": "x"}, {1: 2}):
            assert StepwellConnector.build_kv_connector_stats(strange).is_empty()
        monkeypatch.setattr(stats, "_unregister", lambda: None)
        assert KVConnectorProm(h.config, LABELS, {0: ["m", "0"]}).prom_metrics is None, "the names are taken"


def test_values_of_a_label_are_bounded(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        prom = KVConnectorProm(h.config, LABELS, {0: ["m", "0"]})
        for n in range(3 * MAX_VALUES):
            prom.observe({f"misses/{n}": 1})
        misses = {key[-1]: n for key, n in exposed().items() if key[0] == "stepwell_engine_missed_requests_total"}
        assert len(misses) == MAX_VALUES + 1
        assert misses["other"] == 2 * MAX_VALUES
        prom.observe({"misses/0": 1})
        assert exposed()["stepwell_engine_missed_requests_total", "0", "m", "0"] == 2


def test_stats_add_up_reduce_and_end() -> None:
    a, b = EngineStats({"misses/x": 1, "recalls/": 2}), EngineStats({"misses/x": 3, "misses/y": 5})
    a = pickle.loads(pickle.dumps(a))
    both = a.aggregate(b)
    assert both.to_dict() == {"misses/x": 4, "misses/y": 5, "recalls/": 2}
    assert (a.data, b.data) == ({"misses/x": 1, "recalls/": 2}, {"misses/x": 3, "misses/y": 5})
    assert both.reduce() == {"misses": 9, "recalls": 2}
    assert EngineStats({"transfer_bytes/spill": 1_500_000, "transfer_bytes/recall": 1}).reduce() == {
        "spill MB": 1.5,
        "recall MB": 0.0,
    }
    both.reset()
    assert both.is_empty() and not EngineStats({"recalls/": 1}).is_empty()


def test_a_tally_is_taken_once_and_knows_only_names_of_families() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.counted("bypassed_adapter", 2)
    tally.counted("nothing_of_ours", 1)
    tally.answered("end")
    tally.recalled({"host": 0}, 1.0)
    tally.copied(StepReport())
    tally.counted("failed_loads", 1)
    counts = tally.take()
    assert counts == {"misses/adapter": 2, "errors/failed_load": 1}
    assert tally.take() is None
    assert all(key.partition("/")[0] in FAMILIES for key in counts)


def test_an_inert_connector_says_nothing(tmp_path: Path) -> None:
    with open_well("32MiB") as well, Engine(setup_in(tmp_path, extra={"block_tokens": 7}), well) as h:
        assert h.half is None
        h.serve(prompt(100))
        assert h.connector_stats == []
