"""Scoring near the data: the same pages as when the index is here, for far fewer bytes, by a process that leaves
nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from stepwell.errors import BackendDown, CapacityError, ConfigError, StepwellError
from stepwell.longctx import AttentionMode, Policy, TieredCache, attach, policies
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.near import wire
from stepwell.longctx.near.keys import NearKeys
from stepwell.longctx.near.process import NearPages, NearProcess
from stepwell.longctx.parts.index.exact import Keys, TrueKeys
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.index.rotated import RotatedKeys
from stepwell.longctx.parts.residency.hitrate import HitRate
from stepwell.longctx.parts.select.mass import estimate
from stepwell.longctx.parts.select.topk import TopK, TopP
from stepwell.longctx.shape import PageShape
from tests.longctx.models import make, tokens
from tests.longctx.store_kit import PAGES, StoreMachine, check_shapes
from tests.longctx.test_exact import stepped

HERE = Policy("here", index=RotatedKeys(4), selector=TopK(0.15), page_tokens=1, joint=False, window=16, draft_tokens=4)
PARTS = [150, *[1] * 30]
PAGE = 64


@pytest.fixture(scope="module")
def process() -> Iterator[NearProcess]:
    with closing(NearProcess(PAGES * PAGE, None)) as made:
        yield made


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# --- pages -----------------------------------------------------------------------------------


def test_pages_there_are_a_store_like_any_other(process):
    machine = type("There", (StoreMachine,), {"make": lambda: NearPages(process, PAGE)})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))
    check_shapes(NearPages(process, PAGE))


# --- scores ----------------------------------------------------------------------------------


def asked(index, granularity, shape, keys, query, **options):
    index.add(keys)
    hot = torch.linspace(-1, 4, query[..., 0].numel()).view(query.shape[:3])
    return estimate(index.score(query), hot, granularity=granularity, page_tokens=shape.tokens, **options), hot


@pytest.mark.parametrize("kind, shape", [
    (RotatedKeys(4, centred=False), PageShape(1, 3, 1, 64, 64)),
    (TrueKeys(), PageShape(2, 2, 8, 16, 16)),
    (MinMax(), PageShape(2, 2, 8, 16, 16)),
])  # fmt: skip
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("padded", [False, True])
def test_the_best_pages_and_their_masses_are_those_of_an_index_here(process, kind, shape, softcap, padded):
    made = torch.Generator().manual_seed(2)
    keys = torch.randn(3, shape.heads, 400, shape.key_dim, generator=made)
    query = 2 * torch.randn(3, shape.heads, shape.group, shape.key_dim, generator=made)
    valid = torch.ones(3, 400, dtype=torch.bool)
    valid[1, :33], valid[2, :200] = False, False
    always = torch.zeros(3, 400 // shape.tokens, dtype=torch.bool)
    always[1, 40 // shape.tokens], always[2, 210 // shape.tokens] = True, True
    options = {"scale": 0.25, "softcap": softcap, "tokens": 500}
    options |= {"valid": valid, "always": always} if padded else {}
    here = kind.build(shape)
    expected, hot = asked(here, here.granularity, shape, keys, query, **options)
    near = NearKeys(process, Ledger(), 5, kind, shape)
    near.add(keys)
    assert near.nbytes == 0 and near.far_bytes == here.nbytes
    count = round(0.15 * 500 / shape.tokens)
    for _ in range(2):  # what is known there of padding is not told again
        found = near.estimate(query, hot, count=count, **options)
        ours, theirs = TopK(0.15).select(found), TopK(0.15).select(expected)
        assert torch.equal(ours.pages, theirs.pages) and torch.equal(ours.valid, theirs.valid)
        whole = found.mass.sum(-1) + found.hot_mass
        assert (whole - 1).abs().max() < 2e-3 and torch.equal(found.hot_mass, expected.hot_mass)
        best = torch.zeros_like(always).scatter_(1, ours.pages, ours.valid)
        off = (found.mass - expected.mass).abs()[best[:, None, None].expand_as(found.mass) & (expected.mass > 1e-6)]
        assert off.max() < 1e-3
    others = ~best & (always.new_ones(()) if not padded else valid.unflatten(1, (-1, shape.tokens)).any(-1))
    left = (found.mass * others[:, None, None]).sum(-1) - (expected.mass * others[:, None, None]).sum(-1)
    assert left.abs().max() < 2e-3  # what is not told of is not forgotten


def test_rows_that_change_places_take_their_padding_along(process):
    shape, kind = PageShape(1, 1, 1, 8, 8), TrueKeys()
    made = torch.Generator().manual_seed(3)
    keys, query = torch.randn(2, 1, 50, 8, generator=made), torch.randn(2, 1, 1, 8, generator=made)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[1, :30] = False
    near, here = NearKeys(process, Ledger(), 9, kind, shape), kind.build(shape)
    near.add(keys)
    here.add(keys)
    hot, options = torch.zeros(2, 1, 1), {"scale": 1.0, "softcap": None, "tokens": 60}
    for lanes in ([0, 1], [1, 0], [1, 1], [0, 0]):
        order = torch.tensor(lanes)
        for index in (near, here):
            index.rows(order)
        query, valid = query[order], valid[order]
        found = near.estimate(query, hot, count=9, valid=valid, **options)
        expected = estimate(here.score(query), hot, granularity="token", page_tokens=1, valid=valid, **options)
        assert torch.equal(TopK(0.15).select(found).pages, TopK(0.15).select(expected).pages)


def test_nothing_that_was_not_told_of_comes_first(process):
    """Where all weights are equal, rounding decides: it must not prefer what nobody has scored."""
    shape = PageShape(1, 1, 1, 16, 16)
    near = NearKeys(process, Ledger(), 6, TrueKeys(), shape)
    near.add(torch.zeros(1, 1, 777, 16))
    for hot in torch.linspace(0, 1, 9):
        lse = hot.view(1, 1, 1)
        found = near.estimate(torch.ones(1, 1, 1, 16), lse, scale=1.0, softcap=None, tokens=800, count=50)
        assert (found.score > found.score.min()).sum() == 50


def test_scoring_moves_a_twentieth_of_what_reading_keys_would(process):
    """2K tokens, 15 %, the heads of the demo's model: by count, not by time."""
    shape, ledger = PageShape(1, 3, 1, 64, 64), Ledger()
    near = NearKeys(process, ledger, 7, RotatedKeys(4, centred=False), shape)
    keys = torch.randn(3, 1, 2048, 64)
    near.add(keys)
    near.estimate(torch.randn(3, 1, 3, 64), torch.zeros(3, 1, 3), scale=0.1, softcap=None, tokens=2048, count=307)
    told = ledger.snapshot()
    assert 0 < 20 * told["bytes_score"] <= keys.numel() * 2
    assert told["moved"]["hot to cold: score"] > 0 and told["moved"]["cold to hot: score"] > 307 * 3 * 6
    assert told["bytes_cold_to_hot"] == ledger.cold_to_hot() == 0
    assert told["moved"]["hot to cold: index"] > keys.nbytes


@dataclass(frozen=True)
class OwnKind:
    """In a module that imports the whole package, as the tests do."""

    factor: float = 1.0

    def build(self, shape):
        assert TieredCache.__name__ == "TieredCache"
        return Keys(shape)


def test_a_kind_of_ones_own_is_made_there(process):
    NearKeys(process, Ledger(), 8, OwnKind(2.0), PageShape(1, 1, 1, 4, 4)).add(torch.ones(1, 1, 3, 4))


@dataclass(frozen=True)
class Tangled:
    inside: object

    def build(self, shape):
        return Keys(shape)


class NoData:
    def build(self, shape):
        return Keys(shape)


@pytest.mark.parametrize("kind", [Tangled([1]), NoData()])
def test_a_kind_that_cannot_be_made_there_is_refused_before_anything_runs(kind):
    policy = replace(HERE, executor="near_data", index=kind)
    with pytest.raises(ConfigError) as raised:
        TieredCache(make().config, policy, hot_tokens=120)
    assert raised.value.code == "SW-129"


# --- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize("change, kind, rows", [
    ({}, "llama", 2),
    ({"page_tokens": 8, "joint": True, "prefetch": True, "index": RotatedKeys(2)}, "llama", 1),
    pytest.param(
        {"page_tokens": 8, "joint": True, "index": MinMax(), "codec": policies.named("yakv").codec}, "gemma2", 1,
        marks=pytest.mark.nightly,
    ),
    pytest.param({"residency": HitRate(), "attend_hot": False}, "qwen3", 1, marks=pytest.mark.nightly),
])  # fmt: skip
def test_near_data_selects_what_a_fetch_would(change, kind, rows, tmp_path):
    model, ids = make(kind), tokens(180, rows=rows)
    mask = torch.ones(rows, 180, dtype=torch.long)
    mask[1:, :61] = 0
    found = []
    for executor in ("fetch", "near_data"):
        policy, disk = replace(HERE, executor=executor, **change), [f"{tmp_path}:64MiB"]
        with attach(model, policy, hot_tokens=120, host="32KiB", disk=disk) as attached:
            cache = attached.new_cache()
            logits = stepped(model, ids, cache, PARTS, mask if rows > 1 else None)
            cache.measure()
            found.append((logits, cache.ledger.snapshot()))
            cache.close()
    (here, told), (there, also) = found
    off = (here - there).abs()
    assert (off if rows == 1 else off[mask.bool()]).max() < 1e-4 * here.abs().max()
    assert also["pages"]["selected"] == told["pages"]["selected"]
    assert also["bytes_cold_to_hot"] == told["bytes_cold_to_hot"] > 0
    assert also["uncovered_mass"] == pytest.approx(told["uncovered_mass"], abs=2e-3) and told["uncovered_mass"] > 0
    assert also["index_bytes"] == 0 and also["near_index_bytes"] == told["index_bytes"] > 0
    cold = [one["host_bytes"] + one["disk_bytes"] for one in (told, also)]  # which tier: what was free just then
    assert cold[0] == cold[1] > 0
    assert also["bytes_score"] > told["bytes_score"] == 0


def test_tokens_of_beams_and_of_verified_drafts_are_the_same():
    model, ids = make(), tokens(180)
    verified = replace(HERE, mode=AttentionMode.VERIFIED, executor="near_data")
    options = {"max_new_tokens": 40, "do_sample": False}
    with attach(model, verified, hot_tokens=100, prefill_tokens=64) as attached:
        found = model.generate(ids, **options)
        assert attached.ledger.verifies > 0
    assert torch.equal(found, model.generate(ids, **options))
    beams = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    several = []
    for executor in ("fetch", "near_data"):
        with attach(model, replace(HERE, executor=executor), hot_tokens=100):
            several.append(model.generate(ids, **beams))
    assert torch.equal(*several)


def test_how_much_is_told_follows_from_the_selector():
    assert policies.named("hillinfer").executor == "near_data" and policies.named("hillinfer").scored_share == 0.15
    assert replace(HERE, selector=TopP(0.9, 0.1, 0.3)).scored_share == 0.3
    assert replace(HERE, candidates=0.5).scored_share == 0.5
    for wrong in ({"candidates": 0.0}, {"candidates": 1.5}, {"executor": "elsewhere"}):
        with pytest.raises(ConfigError, match="SW-129"):
            replace(HERE, **wrong)
    with pytest.raises(ConfigError, match="SW-129"):
        Policy("none", AttentionMode.EXACT, executor="near_data")


# --- what can go wrong -----------------------------------------------------------------------


def test_a_generation_ends_with_the_process_and_tells_what_there_is(tmp_path):
    model, ids = make(), tokens(180)
    policy = replace(HERE, executor="near_data")
    with attach(model, policy, hot_tokens=100, host=None, disk=[f"{tmp_path}:64MiB"]) as attached:
        before = descriptors()
        cache = attached.new_cache()

        def kill(module, args):
            if cache.get_seq_length() == 190:
                os.kill(cache.setting.near.pid, signal.SIGKILL)

        handle = model.register_forward_pre_hook(kill)
        with pytest.raises(BackendDown) as raised:
            model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
        handle.remove()
        assert raised.value.code == "SW-509" and "signal 9" in raised.value.why
        assert 188 <= raised.value.tokens.shape[1] <= 192
        assert cache.setting.near.pid is None and cache.ledger.sizes.get("disk", 0) == 0
        with pytest.raises(StepwellError, match="SW-133"):  # and it does not come back half empty
            model(ids[:, :1], past_key_values=cache)
        cache.close()
        assert descriptors() <= before


def test_no_process_and_no_descriptor_is_left(tmp_path):
    model, ids = make(), tokens(180)
    with attach(model, replace(HERE, executor="near_data"), hot_tokens=100, disk=[f"{tmp_path}:64MiB"]) as attached:
        before = descriptors()
        cache = attached.new_cache()
        assert cache.setting.near.pid is None  # not before it is needed
        stepped(model, ids, cache, [150, *[1] * 5])
        pid, index = cache.setting.near.pid, cache.tiered[0].state.index
        assert alive(pid) and index.far_bytes > 0
        cache.reset()
        assert index.far_bytes == 0  # what nobody asks for any more is not kept
        stepped(model, ids, cache, [150])
        cache.close()
        cache.close()
        assert not Path(f"/proc/{pid}").exists() and descriptors() <= before  # not even a zombie
        cache = attached.new_cache()
        stepped(model, ids, cache, [150])
        pid = cache.setting.near.pid
        del cache
        assert not Path(f"/proc/{pid}").exists() and descriptors() <= before


def test_one_that_hangs_is_given_up():
    process = NearProcess("1MiB", None, patience=0.5)
    store = NearPages(process, PAGE)
    pid = process.pid
    stop(pid)
    with pytest.raises(BackendDown, match="did not answer") as raised:
        store.put(torch.zeros(1, PAGE, dtype=torch.uint8))
    assert raised.value.code == "SW-509" and not Path(f"/proc/{pid}").exists()
    store.free(torch.zeros(1, dtype=torch.int64))
    store.close()
    assert store.bytes_by_tier() == {}
    process.close()
    with pytest.raises(ValueError, match="closed"):
        store.get(torch.zeros(1, dtype=torch.int64))


def test_a_call_that_is_interrupted_ends_it():
    """Its answer would be taken for that of the next call."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with closing(NearProcess("1MiB", None)) as process:
        store = NearPages(process, PAGE)
        stop(process.pid)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                store.bytes_by_tier()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(BackendDown, match="interrupted"):
            store.get(torch.zeros(1, dtype=torch.int64))


def test_one_that_is_closed_while_it_starts_is_not_left_behind():
    class Hasty(NearProcess):
        def _exchange(self, *args: object, **options: object) -> object:
            self._gone = "it was closed"
            return super()._exchange(*args, **options)

    process = Hasty("1MiB", None)
    with pytest.raises(BackendDown, match="closed"):
        NearPages(process, PAGE)
    assert process._child.returncode == -signal.SIGKILL
    process.close()


def test_it_leaves_no_core_dump(process):
    NearPages(process, PAGE)
    filter_of = Path(f"/proc/{process.pid}/coredump_filter")
    assert not filter_of.exists() or int(filter_of.read_text(), 16) == 0


def test_a_bug_there_ends_it_and_says_what_it_was():
    with closing(NearProcess("1MiB", None)) as process:
        with pytest.raises(BackendDown, match="KeyError"):
            process.call("scores", wire.Crop(99, 0))
        assert process.pid is None


def test_errors_of_the_store_there_are_raised_here(tmp_path):
    model, ids = make(), tokens(180)
    policy = replace(HERE, executor="near_data")
    with attach(model, policy, hot_tokens=100, host="8KiB") as attached:
        cache = attached.new_cache()
        with pytest.raises(CapacityError, match="SW-209"):
            stepped(model, ids, cache, [150, 1, 1])  # pages are stored beside the model
        cache.close()


def test_a_forked_child_neither_uses_it_nor_ends_it(process):
    NearPages(process, PAGE)
    child = os.fork()
    if not child:
        status = 1
        try:
            process.close()
            process.call("pages", wire.Usage(PAGE))
        except ValueError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert alive(process.pid) and NearPages(process, PAGE).bytes_by_tier() == {"host": 0}


def starts_one_and_is_killed(tell):
    process = NearProcess("1MiB", None)
    NearPages(process, 64)
    fork = os.fork()
    if not fork:
        os.close(tell)
        signal.pause()
    os.write(tell, f"{process.pid} {fork}".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_ends_with_the_process_that_started_it():
    """Killed, while a process that it has forked holds its descriptors."""
    heard, tell = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            starts_one_and_is_killed(tell)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(heard) as told:
        pid, fork = map(int, told.read().split())
    os.waitpid(parent, 0)
    try:
        for _ in range(200):
            if not alive(pid):
                break
            time.sleep(0.05)
        assert not alive(pid) and alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
