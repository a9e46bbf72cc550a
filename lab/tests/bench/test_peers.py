"""The comparison with vLLM's tiers, as far as it is arithmetic, files and processes: no engine runs here."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench import storage
from lab.bench.__main__ import main
from lab.bench.compared import itl, oversize, peer_samples, repeats, systems
from lab.bench.compared.itl import Half, Pair
from lab.bench.compared.peer_samples import BARE, Kind, Read, Sample, order
from lab.bench.compared.peers import OUTPUT, Workload
from lab.bench.compared.systems import DISK, HOST, LIMIT, SYSTEMS, VLLM_CPU, VLLM_FS, Memory
from lab.bench.report import Row
from stepwell.demo.documents import DemoDocument
from stepwell.demo.engine_main import Arrivals
from stepwell.demo.model import kv_bytes_per_token
from stepwell.demo.page_cache import drop_page_cache
from stepwell.demo.wire import Question
from stepwell.errors import ConfigError

MIB = 1 << 20


def sample(system: str, ttft_s: float, *, repetition: int = 0, document: int = 0, kind: Kind = Kind.ALONE) -> Sample:
    return Sample(
        system, 128, repetition, kind, document, ttft_s, cacheable=2048, cached=2048, answer=(1, 2), itl_s=0.02
    )


def run_of(factors: dict[str, float], *, repetitions: int = 5, documents: int = 4) -> list[Sample]:
    """Times of documents of different lengths on a machine whose speed changes from repetition to repetition."""
    print("seed 3")
    speeds = [random.Random(3 + repetition).uniform(0.5, 2.0) for repetition in range(repetitions)]
    return [
        sample(system, factor * speed * (1 + document), repetition=repetition, document=document, kind=kind)
        for kind in (Kind.ALONE, Kind.TOGETHER)
        for repetition, speed in enumerate(speeds)
        for system, factor in factors.items()
        for document in range(documents)
    ]


def row(rows: list[Row], text: str) -> Row:
    (found,) = [row for row in rows if text in row.what]
    return found


# --- who is asked when ------------------------------------------------------------------------------------------------


def test_each_system_comes_first_and_last_equally_often() -> None:
    names = list(SYSTEMS)
    orders = [order(names, repetition) for repetition in range(len(names))]
    assert all(sorted(found) == sorted(names) for found in orders)
    assert sorted(found[0] for found in orders) == sorted(names)
    assert sorted(found[-1] for found in orders) == sorted(names)
    assert order(names, len(names)) == names


@pytest.mark.parametrize("count", [6, 40])
def test_only_the_limits_pool_holds_everything(count: int) -> None:
    documents = [DemoDocument(str(number), 2000, (1,) * (2000 + 7 * number)) for number in range(count)]
    work = Workload(Path(), documents, page=128, together=2, kv_token=23040)
    limit, small = work.shape(LIMIT), work.shape(DISK)
    tokens, longest = sum(len(document.prompt) + OUTPUT for document in documents), 2000 + 7 * (count - 1) + OUTPUT
    assert limit.pool_pages > sum(-(-(len(document.prompt) + OUTPUT) // 128) for document in documents)
    assert 2 * longest <= small.pool_pages * 128 < tokens / 2, "room for those that come together, not for all"
    assert small.pool_pages * 128 >= tokens // 4 - 128
    assert small.max_model_len == limit.max_model_len >= longest
    assert replace(work, small=96 * MIB).memory().small == 96 * MIB
    memory = work.memory()
    assert memory.large >= 1.5 * tokens * 23040 and memory.large % MIB == 0
    assert memory.large / 2 > memory.small >= 2 * longest * 23040 and memory.small % MIB == 0


def test_questions_come_after_their_steps_or_when_nothing_else_is_to_do() -> None:
    arrivals = Arrivals([Question("c", after=7), Question("a"), Question("b", after=2), Question("a again")])
    assert arrivals.due(0, idle=True) == [1, 3]
    assert arrivals.due(1, idle=False) == []
    assert arrivals.due(2, idle=False) == [2]
    assert arrivals.due(3, idle=False) == []
    assert arrivals.due(3, idle=True) == [0], "an engine that has nothing to do makes no steps to wait for"
    assert arrivals.due(9, idle=True) == []


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_ratios_are_those_of_the_same_repetition_and_document() -> None:
    samples = run_of({LIMIT: 1.0, HOST: 1.2})
    random.Random(1).shuffle(samples)
    found = peer_samples.paired(samples, HOST, LIMIT, Kind.ALONE, peer_samples.ttft)
    assert len(found) == 20
    assert found == pytest.approx([1.2] * 20), "the machine's speed and the document's length are not in them"


def test_a_sample_without_a_partner_is_left_out() -> None:
    samples = [sample(HOST, 2.0), sample(HOST, 3.0, document=1), sample(LIMIT, 1.0)]
    assert peer_samples.paired(samples, HOST, LIMIT, Kind.ALONE, peer_samples.ttft) == [2.0]
    assert peer_samples.best_over_best(samples, HOST, LIMIT, Kind.ALONE, peer_samples.ttft) == [2.0]
    assert peer_samples.paired(samples, HOST, LIMIT, Kind.TOGETHER, peer_samples.ttft) == []


def test_best_of_repetitions_over_the_best_of_the_limit() -> None:
    times = {HOST: [3.0, 1.5, 2.0], LIMIT: [1.0, 2.0, 4.0]}
    samples = [
        sample(system, seconds, repetition=number)
        for system, values in times.items()
        for number, seconds in enumerate(values)
    ]
    assert peer_samples.best_over_best(samples, HOST, LIMIT, Kind.ALONE, peer_samples.ttft) == [1.5]


def test_what_was_not_counted_has_no_ratio() -> None:
    counted, not_counted = replace(sample(HOST, 1.0), cpu_s=3.0), sample(LIMIT, 1.0)
    assert peer_samples.paired([counted, not_counted], HOST, LIMIT, Kind.ALONE, lambda found: found.cpu_s) == []


# --- hits and answers -------------------------------------------------------------------------------------------------


def test_hits_are_of_the_tokens_that_whole_pages_hold() -> None:
    full, half = sample(HOST, 1.0), replace(sample(HOST, 1.0, document=1), cached=1024)
    assert peer_samples.hit_share([full, half]) == 0.75
    assert peer_samples.hit_share([]) is None


def test_answers_are_compared_with_the_limits_of_the_same_repetition() -> None:
    samples = [
        sample(LIMIT, 1.0),
        replace(sample(LIMIT, 1.0, repetition=1), answer=(7,)),
        sample(HOST, 1.0),
        sample(HOST, 1.0, repetition=1),
        sample(HOST, 1.0, document=9),
    ]
    assert peer_samples.identical(samples, HOST, Kind.ALONE) == (1, 2)


# --- rows and their targets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "met"), [(1.24, True), (1.26, False)])
def test_the_disk_is_judged_by_its_ratio_to_the_limit(factor: float, met: bool) -> None:
    rows = peer_samples.rows(run_of({LIMIT: 1.0, DISK: factor}), [], 128)
    found = row(rows, "stepwell-disk, page 128: TTFT over the limit's")
    assert found.measured is not None and found.measured.value == pytest.approx(factor)
    assert found.met is met
    assert f"best of repetitions {factor:.3f}" in found.beside


@pytest.mark.parametrize(("factor", "p50", "p95"), [(1.59, True, True), (1.62, True, False), (1.66, False, False)])
def test_several_at_a_time_are_judged_by_both_percentiles(factor: float, p50: bool, p95: bool) -> None:
    rows = peer_samples.rows(run_of({LIMIT: 1.0, DISK: factor}), [], 128)
    assert row(rows, "several at a time: TTFT over the limit's, p50").met is p50
    assert row(rows, "several at a time: TTFT over the limit's, p95").met is p95


@pytest.mark.parametrize(("factor", "met"), [(0.99, True), (1.01, False)])
def test_host_recalls_are_judged_beside_vllms_cpu_tier_and_an_engine_hit(factor: float, met: bool) -> None:
    samples = run_of({LIMIT: 1.0, VLLM_CPU: 1.08, HOST: 1.08 * factor})
    copied = [replace(found, copy_s=found.ttft_s / 12) if found.system == HOST else found for found in samples]
    rows = peer_samples.rows(copied, [], 128)
    judged = ["stepwell-host, page 128: TTFT over the limit's", "stepwell-host over vllm-cpu, page 128: TTFT"]
    assert [(found.what, found.met) for found in rows if found.target] == [(what, met) for what in judged]
    assert row(rows, "the copy itself").beside == f"{1.08 * factor / 12:.3f} of the limit's TTFT"


@pytest.mark.parametrize(("factor", "met"), [(1.07, True), (1.09, False)])
def test_the_disk_is_judged_beside_an_engine_hit_and_a_bare_read(factor: float, met: bool) -> None:
    samples = run_of({LIMIT: 1.0, BARE: 1.3, DISK: 1.3 * factor})
    rows = peer_samples.rows([found for found in samples if found.kind is Kind.ALONE], [], 128)
    (only,) = [found for found in rows if BARE in found.what]
    assert only.met is met


@pytest.mark.parametrize(("cached", "met"), [(2048, True), (2047, False)])
def test_the_disk_has_to_hit_every_block(cached: int, met: bool) -> None:
    samples = run_of({LIMIT: 1.0, DISK: 1.1})
    samples[-1] = replace(samples[-1], cached=cached)
    rows = peer_samples.rows(samples, [], 128)
    assert row(rows, "one at a time: blocks hit").met is True
    assert row(rows, "several at a time: blocks hit").met is met


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (1.01, False)])
def test_the_disk_must_not_be_behind_vllms(factor: float, met: bool) -> None:
    rows = peer_samples.rows(run_of({LIMIT: 1.0, VLLM_FS: 1.0, DISK: factor}), [], 128)
    judged = [found for found in rows if found.what.startswith("stepwell-disk over vllm-fs")]
    assert [found.met for found in judged] == [met] * 3, "one at a time, and both percentiles of several"


@pytest.mark.parametrize(("cached", "met"), [(2010, True), (2000, False)])
def test_blocks_hit_after_a_restart_of_everything(cached: int, met: bool) -> None:
    restarted = [replace(sample(DISK, 1.3, kind=Kind.RESTARTED), cached=cached)]
    rows = peer_samples.rows([*run_of({LIMIT: 1.0, DISK: 1.1}), *restarted], [], 128)
    found = row(rows, "after a restart of everything")
    assert found.measured is not None and found.measured.value == pytest.approx(cached / 2048)
    assert found.met is met


def test_pages_do_not_mix() -> None:
    other = [replace(found, page=32, ttft_s=9 * found.ttft_s) for found in run_of({LIMIT: 1.0, DISK: 1.4})]
    rows = peer_samples.rows([*run_of({LIMIT: 1.0, DISK: 1.1}), *other], [], 32)
    assert all("page 128" not in found.what for found in rows)
    assert row(rows, "stepwell-disk, page 32: TTFT over the limit's").met, "its own target: 1.45"


def test_what_came_from_the_device_is_shown_of_systems_with_a_disk() -> None:
    reads = [Read(DISK, 128, 900, 1000), Read(DISK, 128, 1000, 1000), Read(DISK, 32, 0, 1000), Read(HOST, 128, 0, 1000)]
    rows = peer_samples.rows(run_of({LIMIT: 1.0, HOST: 1.0, DISK: 1.1}), reads, 128)
    found = row(rows, "read from the device")
    assert found.measured is not None and found.measured.value == pytest.approx(0.95)


# --- repeats, turns and a context larger than host memory -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "factor", "met"),
    [(Kind.EXACT, 0.74, True), (Kind.EXACT, 0.76, False), (Kind.TURN, 1.04, True), (Kind.TURN, 1.06, False)],
)
def test_repeats_and_turns_are_judged_by_their_ratios_to_an_engine_hit(kind: Kind, factor: float, met: bool) -> None:
    samples = [replace(found, kind=kind) for found in run_of({LIMIT: 1.0, HOST: factor}) if found.kind is Kind.ALONE]
    assert [found.met for found in repeats.rows(samples, 128) if found.measured and found.target] == [met]
    assert not [found for found in repeats.rows(samples, 32) if found.target], "pages of 32 tokens are not judged"


@pytest.mark.parametrize(
    ("cached", "factor", "met"), [(2048, 1.07, [True, True]), (2047, 1.07, [False, True]), (2048, 1.09, [True, False])]
)
def test_a_context_larger_than_host_memory_has_to_come_whole_and_in_time(
    cached: int, factor: float, met: list[bool]
) -> None:
    samples = run_of({LIMIT: 0.4, BARE: 1.0, DISK: factor}, documents=1)
    one = [found for found in samples if found.kind is Kind.ALONE]
    one[-1] = replace(one[-1], cached=cached)
    assert [found.met for found in oversize.rows(one, 2048) if found.target] == met


def test_a_token_of_the_large_context_has_128_kib() -> None:
    assert kv_bytes_per_token(oversize.SHAPE) == oversize.TOKEN_BYTES == 128 << 10


# --- time between tokens ----------------------------------------------------------------------------------------------


def pair(ratio: float = 1.05, tokens: int = 2000) -> Pair:
    hits = Half((0.02, 0.02), (0.1,), (tokens,) * 5, 0)
    return Pair(replace(hits, itl_s=(0.02 * ratio, 0.02 * ratio), recalled=5 * tokens), hits)


@pytest.mark.parametrize(("ratio", "met"), [(1.04, True), (1.06, False)])
def test_running_requests_beside_recalls_are_judged(ratio: float, met: bool) -> None:
    rows = itl.rows(HOST, [pair(ratio)] * 3, kv_token=23040)
    assert rows[0].met is met


def test_pairs_that_cannot_be_compared_do_not_count() -> None:
    good = pair()
    partly = replace(good, recalls=replace(good.recalls, recalled=9999))
    nothing = replace(good, recalls=replace(good.recalls, recalled=0, cached=(0,) * 5))
    recalled_too = replace(good, hits=replace(good.hits, recalled=128))
    unequal = replace(good, hits=replace(good.hits, cached=(1920,) * 5))
    assert good.fair
    assert not any(found.fair for found in (partly, nothing, recalled_too, unequal))
    (only,) = itl.rows(HOST, [partly, unequal], kv_token=23040)
    assert only.measured is None and only.met is None


def test_too_little_recalled_is_no_verdict() -> None:
    rows = itl.rows(HOST, [pair(), pair(tokens=1700)], kv_token=23040)
    assert rows[0].measured is not None and rows[0].target is None
    assert "196 MB" in rows[0].beside


# --- the systems ------------------------------------------------------------------------------------------------------


def test_what_is_configured(tmp_path: Path) -> None:
    memory = Memory(large=512 * MIB, small=96 * MIB)
    made = {name: systems.system(name, tmp_path, memory) for name in SYSTEMS}
    assert made[LIMIT].connector is None
    configured = {
        name: made[name].connector["kv_connector_extra_config"]  # type: ignore[index]
        for name in SYSTEMS
        if name != LIMIT
    }
    assert configured[VLLM_CPU]["cpu_bytes_to_use"] == memory.large
    assert configured[HOST]["host"] == "512MiB" and "disk" not in configured[HOST]
    assert configured[VLLM_FS]["cpu_bytes_to_use"] == memory.small
    assert configured[DISK]["host"] == "96MiB"
    assert configured[DISK]["disk"] == f"{made[DISK].disk}:4GiB"
    assert configured[VLLM_FS]["secondary_tiers"][0]["root_dir"] == str(made[VLLM_FS].disk)
    assert not any(configured[name]["offload_prompt_only"] for name in (VLLM_CPU, VLLM_FS)), "its best settings"
    folders = [made[name].disk for name in (VLLM_FS, DISK)] + [made[name].home for name in (HOST, DISK)]
    assert len(set(folders)) == 4, "nobody shares files or a well"
    assert str(systems.SHIM) in made[VLLM_FS].env["PYTHONPATH"].split(os.pathsep)


def test_the_limit_is_always_measured() -> None:
    assert systems.check([HOST]) == (LIMIT, HOST)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="lmcash") as caught:
        systems.check([HOST, "lmcash"])
    assert caught.value.code == "SW-102" and all(name in caught.value.fix for name in SYSTEMS)


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("cc") is None
    with pytest.raises(ConfigError, match="the command cc") as caught:
        systems.check([VLLM_CPU])
    assert caught.value.code == "SW-113" and "apt install gcc" in caught.value.fix
    assert systems.check([HOST, DISK]) == (LIMIT, HOST, DISK), "stepwell itself needs none"


def test_outside_a_clone_vllms_tiers_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "SHIM", tmp_path)
    with pytest.raises(ConfigError, match="benchmarks/peers is not there") as caught:
        systems.check([VLLM_FS])
    assert caught.value.code == "SW-113"


def test_the_shim_is_where_it_is_looked_for() -> None:
    assert {"peers_cpu_shim.py", "bcopy.c", "README.md"} <= {path.name for path in systems.SHIM.iterdir()}


def test_systems_are_chosen_for_benchmarks_that_compare_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["peers", "lookup", "--systems", "limit"])
    assert "lookup does not compare systems" in capsys.readouterr().err


# --- files and processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that reads a file as often as it is told to, and holds a named file in shared memory."""
    code = (
        "import sys, mmap\n"
        "shared = open(sys.argv[2], 'w+b'); shared.truncate(4096); held = mmap.mmap(shared.fileno(), 4096)\n"
        "print('ready', flush=True)\n"
        "for _ in sys.stdin:\n"
        "    print(len(open(sys.argv[1], 'rb').read()), flush=True)\n"
    )
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "file"
    path.write_bytes(os.urandom(8 * MIB))
    shared = Path("/dev/shm") / f"stepwell-test-{os.getpid()}"
    command = [sys.executable, "-c", code, str(path), str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
    shared.unlink(missing_ok=True)


def read_once(reader: subprocess.Popen[str]) -> int:
    """Bytes that one read of the file took from the device."""
    before = storage.moved([reader.pid]).read
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write("go\n")
    reader.stdin.flush()
    assert int(reader.stdout.readline()) == 8 * MIB
    return storage.moved([reader.pid]).read - before


def test_after_the_page_cache_is_dropped_reads_come_from_the_device(
    reader: subprocess.Popen[str], tmp_path: Path
) -> None:
    if _in_memory(tmp_path):
        pytest.skip("the temporary folder lies in memory")
    assert read_once(reader) < MIB, "just written, it is in the page cache"
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert drop_page_cache(tmp_path) == 8 * MIB
    assert read_once(reader) >= 8 * MIB
    assert read_once(reader) < MIB, "in the page cache again"


def test_dropping_the_page_cache_leaves_links_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self/mem")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert drop_page_cache(tmp_path) == 0


def test_processes_that_ended_moved_nothing(reader: subprocess.Popen[str]) -> None:
    reader.kill()
    reader.wait()
    assert storage.moved([reader.pid]) == storage.Moved(0, 0)


def test_quiet_is_when_nothing_was_written_for_a_while() -> None:
    values = [1, 2, 3, 4, 5]
    polled: list[int] = []

    def written() -> int:
        polled.append(values.pop(0) if len(values) > 1 else values[0])
        return polled[-1]

    assert storage.wait_quiet(written, quiet_s=0.02, limit_s=60)
    assert polled[:5] == [1, 2, 3, 4, 5] and len(polled) > 5


def test_somebody_who_never_stops_writing_is_not_waited_for() -> None:
    assert not storage.wait_quiet(time.monotonic_ns, quiet_s=0.02, limit_s=0.1)


def test_what_a_killed_process_left_in_shared_memory_is_removed(reader: subprocess.Popen[str]) -> None:
    files = storage.shared_files([reader.pid])
    assert [path.name for path in files] == [f"stepwell-test-{os.getpid()}"]
    reader.kill()
    reader.wait()
    assert storage.remove_left(files) == mmap.PAGESIZE
    assert not any(path.exists() for path in files)
    assert storage.remove_left(files) == 0


def _in_memory(folder: Path) -> bool:
    found = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True)
    return found.stdout.strip() in ("tmpfs", "ramfs")
