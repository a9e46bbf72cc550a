"""The ledger tells what was moved, to people, JSON and Prometheus alike."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from stepwell.longctx import attach
from stepwell.longctx.ledger import Ledger, prometheus
from tests.longctx.models import make, tokens
from tests.longctx.test_sparse import verified


def test_metrics_say_what_the_snapshot_says():
    model = make()
    with attach(model, verified(), hot_tokens=100) as attached:
        model.generate(tokens(200), max_new_tokens=20, do_sample=False)
    told = attached.ledger.snapshot()
    assert json.loads(json.dumps(told)) == told
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(prometheus(attached.ledger))
        for sample in family.samples
    }
    name = "stepwell_longctx_bytes_total"
    for moved, nbytes in told["moved"].items():
        (source, target), kind = moved.split(": ")[0].split(" to "), moved.split(": ")[1]
        assert samples[name, (source, target, kind)] == nbytes
    assert samples["stepwell_longctx_tokens_total", ("generated",)] == 20


def test_the_alarm_rings_once_until_it_is_over():
    ledger = Ledger()
    rings = [ledger.uncovered(share, 0.2) for share in [0.1] * 40 + [0.9] * 40 + [0.0] * 80 + [0.9] * 40]
    assert sum(rings) == ledger.alarms == 2
    assert not any(rings[:40])


def test_partial_results_are_not_pages():
    ledger = Ledger()
    for kind, nbytes in (("draft", 1), ("exact", 2), ("warm", 4), ("recall", 8), ("partial", 16)):
        ledger.moved("cold", "hot", kind, nbytes)
    ledger.moved("hot", "cold", "spill", 32)
    assert ledger.cold_to_hot() == 15 and ledger.cold_to_hot("exact") == 2
    assert ledger.snapshot()["bytes_hot_to_cold"] == 32
