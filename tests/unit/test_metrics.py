"""The well's /metrics: the text format, the table behind it, and the small server that many may ask."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from wells import MIB, PATIENCE, InThread, Raw, eventually, home_apart, open_files

from stepwell import events as e
from stepwell import renamed
from stepwell.block.tier import WellStats
from stepwell.client import control, start
from stepwell.config import Settings
from stepwell.errors import BackendDown, ConfigError
from stepwell.hierarchy.counters import Counters
from stepwell.ops.checks import places
from stepwell.protocol.messages import PROTOCOL, Hello, Stats, StatsQuery, Welcome
from stepwell.serve.metrics import endpoint as metrics_module
from stepwell.serve.metrics.endpoint import MAX_HEAD, MAX_REQUESTS, MetricsServer
from stepwell.serve.metrics.exposition import MetricFamily, Sample, number, render
from stepwell.serve.metrics.table import (
    LABELS,
    MAX_LABEL_VALUES,
    METRICS,
    families,
    keys_of,
)


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# the text format ------------------------------------------------------------------------------------------------------


def test_whatever_a_label_holds_is_one_value_of_one_sample() -> None:
    nasty = ['a"b', "a\\b", "a\nb", "a\\nb", '"} 1\nforged{x="', "", "ü"]
    help = 'back\\slash, "quotes"\nand a second line'
    family = MetricFamily("a_total", "counter", help, [Sample({"x": text}, n) for n, text in enumerate(nasty)])
    [back] = text_string_to_metric_families(render([family]))
    assert (back.name, back.type, back.documentation) == ("a", "counter", help)
    assert [(sample.labels["x"], sample.value) for sample in back.samples] == [(t, n) for n, t in enumerate(nasty)]


def test_numbers_keep_all_their_digits() -> None:
    assert [number(n) for n in (0, True, 1 << 62, 0.1, 1e300)] == ["0", "1", str(1 << 62), "0.1", "1e+300"]
    assert [number(float(n)) for n in ("inf", "-inf", "nan")] == ["+Inf", "-Inf", "NaN"]


def test_a_family_without_samples_is_left_out() -> None:
    assert render([MetricFamily("a", "gauge", "", []), MetricFamily("b", "gauge", "h", [Sample({}, 1)])]) == (
        "# HELP b h\n# TYPE b gauge\nb 1\n"
    )


# the table ------------------------------------------------------------------------------------------------------------

NOT_METRICS = frozenset(
    {
        "connections",  # this scrape's own among them
        "connections_refused",  # the log says why
        "engines",  # names for people
        "filling",  # comes and goes within a step
        "free_slots",
        "hits_staged",  # transfer_blocks of the tiers below say it
        "leased_blocks",  # comes and goes within a step
        "messages_refused",  # the log says why
        "paused",  # a sentence; paused_recalls and paused_spills say it in numbers
        "pid",
        "quarantined_sessions",  # quarantined_slots says what they cost
        "sessions_opened",
        "slabs",
        "slabs_made",
        "slabs_retired",
        "tiers",  # the label `tier` has their names
        "trouble",  # a sentence; `troubles` counts
    }
)
"""Stats that people see in `stepwell stats` and that are no metric."""

NOT_METRICS_OF_A_TIER = frozenset(
    {
        "foreign_files",  # what `stepwell cache fsck` lists
        "index_bytes",  # follows from the number of blocks
        "prefetched_blocks",  # prefetched_blocks_total says it as soon as it is known whether they were of use
        "recovered_blocks",  # once, at the start: the log says it
        "recovery_seconds",
        "segments",  # the bytes that are used say it
        "staging_blocks",  # comes and goes within a request's wait
    }
)
"""The same of a tier below the host tier."""


def test_names_and_labels_follow_the_rules() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) <= 40
    for metric in METRICS:
        assert metric.name.startswith("stepwell_") and ":" not in metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert set(metric.labels) <= LABELS or metric.name == "stepwell_build_info"
        assert metric.help.endswith(".")
        for source in metric.sources:
            assert {*source.labels, source.rest, "tier" if source.below else ""} - {""} == set(metric.labels)


def every_stat(folder: Path) -> WellStats:
    """The stats of a live well, with all that it can count counted, and those of a disk tier."""
    well = InThread(folder, disk_bytes=64 * MIB)
    assert well.tier is not None
    well.tier.counts.evicted_blocks = 10
    well.tier.counts.error("read")
    count = well.hierarchy.counters
    for event in (
        e.SessionOpened(1, "m", 1),
        e.SessionEnded(1, 0),
        e.SlabServing(1),
        e.SlabRemoved(1),
        e.RunAnswered(3, 1, 2, "never_seen"),
        e.RunAnswered(0, 0, 5, "evicted"),
        e.RunAnswered(2, 0, 1, "evicted", tail=True),
        e.BlocksRecalled(3, 30),
        e.BlocksSpilled(1, 10),
        e.SpillRefused("no_room"),
        e.BlockDropped("evicted"),
        e.BlockDropped("failed_check"),
        e.CanaryHeard(0.5),
        e.CanaryHeard(2.0),
        e.EngineReported({"bypassed_adapter": 1}),
        e.RecallDecided(1, 0.0, 100, 16, {"disk": 5}, {}, 5, "worth_it", 1.0),
        e.RecallEnded(1, 3, 0.5, 0.25, "late", 0.125, 0.375),
        e.RecallEnded(2, 3, 0.5, 0.25, "limit"),
        e.GivenUpTooSoon(0.125),
        e.ArenaTroubled("no memory"),
        e.BlocksStaged("disk", 6, 5, 0.25),
        e.BlocksWritten("disk", 8, 7, 1.5),
        e.BlockNotRead("disk", "damaged"),
        e.BlockNotWritten("disk", "no_space"),
        e.BlocksPrefetched("disk", 9),
        e.PrefetchEnded(4, 5),
        e.TierBreakerMoved("disk", "read", "open", "it failed"),
        e.TierBreakerMoved("disk", "write", "open", "it failed"),
        e.TierBreakerMoved("disk", "write", "closed", "it answers"),
        e.TierRecovered("disk", 3, 0.5),
    ):
        count(event)
    peer = Raw(well.path)
    peer.send(Hello(PROTOCOL, "admin"), StatsQuery(by_tier=True), StatsQuery())
    assert isinstance(peer.read(), Welcome)
    answer, flat = peer.read(), peer.read()
    peer.close()
    well.close()
    assert isinstance(answer, Stats) and isinstance(flat, Stats)
    stats = WellStats(answer.values, answer.tiers)
    assert flat.tiers == {} and flat.values.keys() == stats.flat().keys(), "as an older command asks"
    assert flat.values["disk_capacity_bytes"] == stats.tiers["disk"]["capacity_bytes"] == 64 * MIB
    return stats


def test_every_stat_is_a_metric_or_is_said_not_to_be(tmp_path: Path) -> None:
    stats = every_stat(tmp_path)
    assert list(stats.tiers) == ["disk"]
    sources = [source for metric in METRICS for source in metric.sources]
    for below, values, none in ((False, stats.well, NOT_METRICS), (True, stats.tiers["disk"], NOT_METRICS_OF_A_TIER)):
        taken = {source.key: keys_of(source, values) for source in sources if source.below is below}
        mapped = {key for keys in taken.values() for key in keys}
        assert mapped & none == set()
        assert values.keys() - mapped - none == set(), "new stats: give them a metric, or say that they are none"
        assert values.keys() >= none, "no longer a stat"
        assert all(taken.values()), "no stat has these names"


def test_samples_are_what_the_stats_say(tmp_path: Path) -> None:
    samples = parsed(render(families(every_stat(tmp_path))))

    def sample(name: str, **labels: str) -> float:
        return samples[f"stepwell_{name}", tuple(sorted(labels.items()))]

    assert sample("build_info", version="test") == 1
    assert sample("block_lookups_total", outcome="hit") == 3
    assert sample("block_lookups_total", outcome="miss") == 7
    assert sample("missed_blocks_total", reason="never_seen") == 2
    assert sample("missed_blocks_total", reason="evicted") == 5
    assert sample("transfer_bytes_total", tier="host", op="recall") == 30
    assert sample("transfer_bytes_total", tier="disk", op="spill") == 7
    assert sample("transfer_seconds_total", tier="disk", op="recall") == 0.25
    assert sample("tier_capacity_bytes", tier="host") == 64 << 20
    assert sample("dropped_blocks_total", tier="host", reason="evicted") == 1
    assert sample("dropped_blocks_total", tier="disk", reason="evicted") == 10
    assert sample("errors_total", tier="host", kind="failed_check") == 1
    assert ("stepwell_dropped_blocks_total", (("reason", "failed_check"), ("tier", "host"))) not in samples
    assert sample("errors_total", tier="disk", kind="read") == 1
    assert sample("recall_failed_blocks_total", tier="disk", reason="damaged") == 1
    assert sample("spill_skipped_blocks_total", tier="disk", reason="no_space") == 1
    assert sample("tier_capacity_bytes", tier="disk") == 64 * MIB
    assert sample("engine_reports_total", kind="bypassed_adapter") == 1


def test_old_names_are_served_beside_the_new_ones_and_say_so(tmp_path: Path) -> None:
    page = {family.name: family for family in families(every_stat(tmp_path))}
    for old, new in renamed.METRICS.items():
        if new in page:  # the others are the engine's
            assert page[old].samples == page[new].samples and page[new].samples
            assert page[old].help == f"Deprecated, gone with the next version: use {new}."


def test_a_well_that_has_seen_nothing_has_a_page_too() -> None:
    samples = parsed(render(families(WellStats({**Counters().values()}))))
    assert samples["stepwell_requests_total", ()] == 0
    assert not any(name.startswith(("stepwell_missed", "stepwell_misses")) for name, _ in samples)


def test_names_from_outside_are_bounded_and_text_is_no_number() -> None:
    values: dict[str, int | float | str] = {f"engine_{n}": n for n in range(MAX_LABEL_VALUES + 10)}
    values |= {"engine_text": "x", "hits": "many", "unheard_of": 7}
    page = parsed(render(families(WellStats(values))))
    assert len(page) == MAX_LABEL_VALUES
    assert {name for name, _ in page} == {"stepwell_engine_reports_total"}


def test_each_tier_below_the_host_tier_has_its_samples(tmp_path: Path) -> None:
    stats = every_stat(tmp_path)
    samples = parsed(render(families(WellStats(stats.well, {**stats.tiers, "far": stats.tiers["disk"]}))))
    of = {
        tier: {(name, tuple(pair for pair in labels if pair[0] != "tier")): value
               for (name, labels), value in samples.items() if ("tier", tier) in labels}
        for tier in ("disk", "far")
    }  # fmt: skip
    assert of["disk"] == of["far"] and len(of["far"]) > 10


# the server -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a runtime directory of their own; whatever well is left there is ended."""
    with home_apart(monkeypatch) as home:
        yield home
        try:
            control.stop(home)
        except BackendDown as error:
            assert error.code == "SW-505", error


@pytest.fixture
def well(home: Path) -> Iterator[InThread]:
    """A well where those who look for the well of `home` find it."""
    place = start.rendezvous(home)
    running = InThread(place.socket.parent)
    os.link(running.path, place.socket)
    yield running
    running.close()
    place.socket.unlink()


def at(home: Path) -> Path:
    """Where a well of `home` listens."""
    return start.rendezvous(home).socket


@pytest.fixture
def server(home: Path) -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1:0", home, at(home)) as running:
        yield running


def get(
    server: MetricsServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    host, port = server.address.rsplit(":", 1)
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PATIENCE)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def raw(server: MetricsServer, sent: bytes) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), PATIENCE)
    sock.sendall(sent)
    return sock


def everything(sock: socket.socket) -> bytes:
    with sock:
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_a_scrape_is_a_page_of_metrics(well: InThread, server: MetricsServer) -> None:
    status, headers, text = get(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Connection"] == "close"
    assert parsed(text)["stepwell_tier_capacity_bytes", (("tier", "host"),)] == 64 << 20
    assert get(server, "/metrics?name[]=x")[0] == 200
    assert get(server, "/healthz")[::2] == (200, "ok\n")
    assert everything(raw(server, b"GET /metrics HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_scrape_asks_where_the_well_listens_and_never_in_home(
    well: InThread, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home may hang, and four of its requests would be the end of the metrics."""
    asked: list[Path] = []
    monkeypatch.setattr("stepwell.client.start.within", lambda home, ask: asked.append(home) or ask())
    assert [get(server, path)[0] for path in ("/metrics", "/healthz")] == [200, 200]
    assert not asked


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics2", "//metrics/..", "http://x/metrics", "/%6detrics"])
def test_there_is_nothing_else(well: InThread, server: MetricsServer, path: str) -> None:
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "get", "__init__"])
def test_it_can_only_be_read(well: InThread, server: MetricsServer, method: str) -> None:
    status, headers, text = get(server, "/metrics", method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert text == ("" if method == "HEAD" else "method not allowed\n")


def test_an_answer_to_head_has_no_body(server: MetricsServer) -> None:
    assert everything(raw(server, b"HEAD /metrics HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")


def test_a_body_that_nobody_reads_does_not_cost_the_answer(server: MetricsServer) -> None:
    head = b"POST /metrics HTTP/1.1\r\nContent-Length: 30000\r\n\r\n"
    assert everything(raw(server, head + bytes(30_000))).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/9.9\r\n\r\n", 505),
        (b"\xff\xfe <script> x y z\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * MAX_HEAD + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * MAX_HEAD, 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    ],
    ids=["version", "garbage", "long header", "long path", "many headers"],
)
def test_a_malformed_request_is_refused_and_not_repeated(server: MetricsServer, sent: bytes, status: int) -> None:
    answer = everything(raw(server, sent))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"<script>" not in answer


def test_who_leaves_at_once_leaves_nothing(well: InThread, server: MetricsServer) -> None:
    before = open_files()
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n") * 5:
        raw(server, sent).close()
    assert get(server, "/healthz")[0] == 200
    eventually(lambda: len(open_files()) <= len(before))


def test_who_is_slow_is_cut_off(well: InThread, server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = metrics_module.REQUEST_SECONDS
    monkeypatch.setattr(metrics_module, "REQUEST_SECONDS", 0.2)
    with raw(server, b"GET /metrics HTTP/1.1\r\n") as sock:
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                try:
                    sock.sendall(b"a: b\r\n")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        ended.set()
        dripping.join()
    monkeypatch.setattr(metrics_module, "REQUEST_SECONDS", limit)
    assert get(server, "/healthz")[0] == 200


def test_no_more_than_a_few_are_answered_at_a_time(
    well: InThread, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "REQUEST_SECONDS", PATIENCE)
    silent = [raw(server, b"GET ") for _ in range(MAX_REQUESTS)]
    with raw(server, b"GET /healthz HTTP/1.1\r\n\r\n") as waiting:
        waiting.settimeout(0.2)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        silent.pop().close()
        waiting.settimeout(PATIENCE)
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    for sock in silent:
        sock.close()


def test_a_scrape_leaves_no_garbage_to_collect(well: InThread, server: MetricsServer) -> None:
    """The well collects only the youngest generation."""
    get(server, "/metrics")
    gc.collect()
    gc.disable()
    try:
        for path in ("/metrics", "/healthz", "/nothing") * 5:
            everything(raw(server, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()))
        everything(raw(server, b"POST / HTTP/1.1\r\n\r\n"))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_process_without_descriptors_serves_again_when_it_has_some(well: InThread, server: MetricsServer) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with raw(server, b"") as sock:
        began = time.monotonic()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
            eventually(lambda: "accept" in server._limited._seen)
            threading.Event().wait(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        attempts = server._limited._seen["accept"][1]
        assert attempts <= MAX_REQUESTS * (1 + (time.monotonic() - began) / metrics_module._AFTER_ERROR_SECONDS)
    assert get(server, "/healthz")[0] == 200


def said(home: Path, address: object) -> tuple[str, str]:
    """Status and text of the doctor's check."""
    (check,) = places.metrics(home, Settings.model_validate({"metrics": str(address)}))
    return check.status, check.text


def test_the_doctor_knows_whether_they_can_be_served_on_a_port(well: InThread, home: Path) -> None:
    with MetricsServer("127.0.0.1:0", home, at(home)) as server:
        assert said(home, server.address) == ("ok", f"the running well serves them at {server.address}")
        assert get(server, "/healthz")[0] == 200, "it goes on"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(PATIENCE)
        address = f"127.0.0.1:{other.getsockname()[1]}"
        leaving = threading.Thread(target=lambda: other.accept()[0].close())
        leaving.start()
        status, text = said(home, address)
        leaving.join()
        assert status == "fail" and "SW-119" in text
    assert said(home, address) == ("ok", f"the well can serve them at {address}")
    with MetricsServer(address, home, at(home)) as server:
        assert server.address == address, "it is left free"


def test_the_doctor_knows_whether_they_can_be_served_at_a_path(home: Path) -> None:
    path = home.parent / "m.sock"
    assert said(home, path)[0] == "ok"
    with MetricsServer(str(path), home, at(home)):
        status, text = said(home, path)
        assert status == "fail" and "another process listens there" in text, "no well of this home runs"
        assert path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert said(home, path)[0] == "ok" and path.exists(), "the well replaces it, the doctor does not"
    path.unlink()
    path.touch()
    for bad in (path, path / "below", home.parent / "none" / "m.sock"):
        status, text = said(home, bad)
        assert status == "fail" and "SW-119" in text
        with pytest.raises(ConfigError) as caught:
            MetricsServer(str(bad), home, at(home))
        assert caught.value.code == "SW-119", "the well says the same"


def test_without_a_well_it_says_so(home: Path, server: MetricsServer) -> None:
    start.rendezvous(home)
    for path in ("/metrics", "/healthz"):
        status, _, text = get(server, path)
        assert (status, text) == (503, "the well did not answer within 1 s [SW-505]\n")


def test_a_well_that_is_stuck_is_not_waited_for(
    home: Path, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "WELL_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(start.rendezvous(home).socket))
        stuck.listen(8)
        status, _, text = get(server, "/metrics")
    assert (status, text) == (503, "the well did not answer within 0.1 s [SW-503]\n")


def test_a_well_that_answers_a_byte_at_a_time_is_not_waited_for(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(start.rendezvous(home).socket))
        listener.listen(8)

        def drip() -> None:
            peer, _ = listener.accept()
            with peer:
                for byte in (100).to_bytes(4, "little") + bytes(96):
                    try:
                        peer.sendall(bytes([byte]))
                    except OSError:
                        return
                    threading.Event().wait(0.02)

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(BackendDown, match="too busy"):
            control.stats(home, 0.2)
        dripping.join()


# where it listens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:0", "8.8.8.8:80", "[::]:0", "example.com:80", "127.0.0.1", "x", ":9"])
def test_only_the_loopback_interface_is_served(home: Path, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricsServer(address, home, at(home))
    assert caught.value.code == "SW-102"


@pytest.mark.parametrize("address", ["localhost:0", "127.0.0.2:0", "[::1]:0"])
def test_any_loopback_address_will_do(well: InThread, home: Path, address: str) -> None:
    if "::" in address and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    with MetricsServer(address, home, at(home)) as server:
        assert get(server, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_an_error_with_a_fix(home: Path, server: MetricsServer) -> None:
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        MetricsServer(server.address, home, at(home))
    assert caught.value.code == "SW-119"
    assert "another process listens there" in str(caught.value)
    assert open_files() == before


def test_a_unix_socket_is_for_its_user_and_gone_at_the_end(well: InThread, home: Path) -> None:
    path = home.parent / "metrics.sock"
    with MetricsServer(str(path), home, at(home)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(str(path))
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"stepwell_uptime_seconds" in everything(sock)
    assert not path.exists()


def test_only_a_dead_socket_is_replaced(home: Path) -> None:
    path = home.parent / "metrics.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with MetricsServer(str(path), home, at(home)):
        with pytest.raises(ConfigError, match=r"another process listens there.*SW-119"):
            MetricsServer(str(path), home, at(home))
        assert path.exists()
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine", "what somebody put in our place stays"
    with pytest.raises(ConfigError, match=r"no socket.*SW-119"):
        MetricsServer(str(path), home, at(home))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("name", "code"), [("nowhere/m.sock", "SW-119"), ("m" * 120, "SW-109")])
def test_a_path_that_cannot_be_made_is_an_error_with_a_fix(home: Path, name: str, code: str) -> None:
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        MetricsServer(str(home.parent / name), home, at(home))
    assert caught.value.code == code
    assert open_files() == before


def test_closing_ends_its_threads(home: Path) -> None:
    before = threading.active_count()
    server = MetricsServer("127.0.0.1:0", home, at(home))
    other = MetricsServer(str(home.parent / "m.sock"), home, at(home))
    assert threading.active_count() == before + 2 * MAX_REQUESTS
    server.close()
    other.close()
    server.close()
    eventually(lambda: threading.active_count() == before)


def test_a_well_serves_what_its_settings_say(home: Path) -> None:
    path = home.parent / "metrics.sock"
    wishes = {"host": "64MiB", "linger_empty": "60s", "metrics": str(path)}
    start.find_or_start(home, wishes)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(path))
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        head, _, text = everything(sock).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert parsed(text)["stepwell_tier_capacity_bytes", (("tier", "host"),)] == 64 << 20
    control.stop(home)
    assert not path.exists()


def test_a_well_whose_metrics_cannot_be_served_does_not_start(home: Path, server: MetricsServer) -> None:
    with pytest.raises(ConfigError) as caught:
        start.find_or_start(home, {"host": "64MiB", "linger_empty": "60s", "metrics": server.address})
    assert caught.value.code == "SW-119"
    assert control.pid(home) is None
