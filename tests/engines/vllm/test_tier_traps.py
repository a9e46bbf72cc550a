"""The traps of vLLM's interface for secondary tiers, one test each, with vLLM's own manager and region."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from stepwell.client.patience import TOTAL_S
from stepwell.client.slabs import Hold
from stepwell.engines.vllm.offloading import lookups
from stepwell.engines.vllm.offloading.lookups import MAX_PROMOTED
from stepwell.errors import IntegrityError

from .local import open_well
from .offloading import content, keys_of, offloading


def test_rows_are_addressed_by_their_stride(tmp_path: Path) -> None:
    """Trap 1: the view has two dimensions, and Python cannot index its rows."""
    keys = keys_of("a", 9)
    with offloading(tmp_path) as engine:
        engine.store(keys)
        engine.forget()
        context = engine.request("r")
        assert engine.hits(keys, context) == 9
        engine.assert_loaded(keys, context)


def test_every_view_is_released_before_shutdown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trap 2: a slice that lives on keeps vLLM's region mapped."""
    with open_well() as well, caplog.at_level(logging.WARNING), offloading(tmp_path, well) as engine:
        engine.store(keys_of("a", 3))
        region = engine.manager.primary_tier._mmap_region
        name = region.mmap_path
        assert os.path.exists(name)
    assert region.mmap_obj is None and not os.path.exists(name)
    assert not [r for r in caplog.records if "mmap" in r.getMessage()]


def test_a_full_cpu_tier_gives_pins_back(tmp_path: Path) -> None:
    """Trap 3: where no row can be freed our hit becomes a miss. What was pinned for it is not kept."""
    keys = keys_of("a", 6)
    with open_well() as well, offloading(tmp_path, well, rows=8) as engine:
        engine.store(keys)
        engine.forget()
        other = engine.request("other")
        assert engine.manager.prepare_store(keys_of("b", 8), other) is not None  # all rows are being written
        context = engine.request("r")
        with patch.object(lookups, "HELD_S", 0.0):
            assert engine.hits(keys, context) == 0
            engine.step()
            engine.step()
        assert well.stats()["pinned_bytes"] == 0


def test_rows_that_jobs_hold_are_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    """Trap 3: while our own jobs hold the rows a request is deferred, and then computed."""
    keys = keys_of("a", 4)
    with offloading(tmp_path, rows=8) as engine:
        engine.store(keys)
        engine.forget()
        context = engine.request("r")
        transfers = engine.tier._transfers
        assert transfers is not None
        transfers.busy_rows = 8
        found = engine.tier._lookups
        assert found is not None
        now = [0.0]
        with patch.object(found, "_clock", lambda: now[0]):
            with pytest.raises(AssertionError, match="for ever"):
                engine.hits(keys, context, passes=50)
            now[0] = lookups.HELD_S
            assert engine.hits(keys, context, passes=50) == 0
        transfers.busy_rows = 0


def test_a_chunk_that_failed_to_load_is_a_miss_and_no_livelock(tmp_path: Path) -> None:
    """Traps 4 and 8: the scheduler would promote it for ever; and one bad chunk is one miss."""
    keys = keys_of("a", 5)
    with open_well() as well, offloading(tmp_path, well) as engine:
        engine.store(keys)
        engine.forget()
        context = engine.request("r")
        transfers = engine.tier._transfers
        assert transfers is not None
        copy_out, entries = transfers._copy_out, list(well.hierarchy.index.values())

        def spoiled(*args: Any) -> int:
            slab, slot = entries[2].slots[0]
            slab.renew(slot)
            return copy_out(*args)

        with patch.object(transfers, "_copy_out", spoiled):
            assert engine.hits(keys, context) == 2
        engine.assert_loaded(keys[:2], context)
        assert engine.manager.primary_tier.lookup(keys[3], context) is LookupResult.HIT  # it was loaded all the same
        engine.finish(context)
        assert entries[2].id not in well.hierarchy.index
        assert engine.hits(keys, engine.request("again")) == 2  # and it is not offered again


def test_a_chunk_that_fails_again_and_again_is_tried_once(tmp_path: Path) -> None:
    """Trap 4: also where the well still has it."""
    keys = keys_of("a", 2)
    with open_well() as well, offloading(tmp_path, well) as engine:
        engine.store(keys)
        engine.forget()
        session = engine.tier._session
        assert session is not None
        client, changed = session.client, IntegrityError("SW-302", what="changed", why="as a test", fix="none")
        with (
            patch.object(client, "forget", lambda *args: None),
            patch.object(session.worker, "verify", side_effect=changed),
            patch.object(client, "recall", wraps=client.recall) as recall,
        ):
            assert engine.hits(keys, engine.request("r")) == 0
        assert recall.call_count == 1


def test_a_slot_that_changes_under_its_copy_is_not_loaded(tmp_path: Path) -> None:
    """Trap 8: the well may take a slot back at any moment, as where it takes this engine for dead."""
    keys = keys_of("a", 3)
    with open_well() as well, offloading(tmp_path, well) as engine:
        engine.store(keys)
        engine.forget()
        context = engine.request("r")
        entry = list(well.hierarchy.index.values())[1]
        slot, taken = Hold.slot, []

        def then_renew(hold: Hold, session: int, slab: int, number: int, generation: int) -> Any:
            found = slot(hold, session, slab, number, generation)
            taken.append(number)
            if len(taken) == 2:
                entry.slots[0][0].renew(entry.slots[0][1])
            return found

        with patch.object(Hold, "slot", then_renew):
            assert engine.hits(keys, context) == 1
        assert len(taken) == 3


def test_a_retry_has_a_deadline(tmp_path: Path) -> None:
    """Trap 5: vLLM asks again at each pass, as long as the answer is RETRY."""
    keys = keys_of("a", 3)
    with open_well() as well, offloading(tmp_path, well) as engine:
        engine.store(keys)
        engine.forget()
        context = engine.request("r")
        client = engine.tier._session.client  # type: ignore[union-attr]
        now = [100.0]
        with patch.object(client, "_found", lambda found: None), patch.object(client, "_clock", lambda: now[0]):
            with pytest.raises(AssertionError, match="for ever"):
                engine.hits(keys, context, passes=50)
            now[0] += TOTAL_S
            assert engine.hits(keys, context) == 0


@pytest.mark.parametrize("part", ["lookup", "take", "end_of_step", "begin", "end", "reset"])
def test_no_exception_leaves_a_hook(tmp_path: Path, part: str) -> None:
    """Trap 6: vLLM catches nothing; the engine would end."""
    keys = keys_of("a", 3)
    with offloading(tmp_path) as engine:
        engine.store(keys)
        engine.forget()
        found = engine.tier._lookups
        assert found is not None

        def broken(*args: Any) -> Any:
            raise KeyError("broken")

        with patch.object(type(found), part, broken):
            context = engine.request("r")
            for _ in range(50):
                for key in keys:
                    engine.manager.lookup(key, context)
                engine.step()
            engine.wait()
            engine.finish(context)
            engine.manager.reset_cache()
        stats = engine.manager.get_stats()
        assert stats.reduce()["vllm:kv_offload_stepwell_errors:('1:stepwell', 'hook')"] > 0


def test_a_store_whose_hook_fails_has_failed(tmp_path: Path) -> None:
    """Trap 6, where a job is at stake: it is reported, or its rows would stay pinned."""
    with offloading(tmp_path) as engine:
        engine.tier.submit_store(SimpleNamespace(job_id=7))  # it lacks all that a job has
        assert engine.tier.has_pending_work()
        assert [(end.job_id, end.success) for end in engine.tier.get_finished_jobs()] == [(7, False)]
        assert not engine.tier.has_pending_work()
        stats = engine.manager.get_stats()
        assert stats.reduce()["vllm:kv_offload_stepwell_errors:('1:stepwell', 'hook')"] > 0


def test_every_job_is_reported_once(tmp_path: Path) -> None:
    """Trap 7: vLLM asserts it, keeps the rows pinned and the engine stepping until then."""
    with offloading(tmp_path) as engine:
        reported: list[int] = []
        finished = type(engine.tier).get_finished_jobs

        def noting(tier: Any) -> Any:
            results = list(finished(tier))
            reported.extend(result.job_id for result in results)
            return results

        with patch.object(type(engine.tier), "get_finished_jobs", noting):
            for number in range(8):
                keys = keys_of(f"p{number}", 5)
                engine.store(keys, f"s{number}")
                engine.forget()
                context = engine.request(f"r{number}")
                assert engine.hits(keys, context) == 5
                engine.finish(context)
        assert sorted(reported) == list(range(16))


def test_jobs_that_are_drained_are_reported(tmp_path: Path) -> None:
    """Trap 7: also those that wait for slots that nobody gives them."""
    keys = keys_of("a", 4)
    with offloading(tmp_path) as engine:
        client = engine.tier._session.client  # type: ignore[union-attr]
        with patch.object(client, "_granted", lambda granted: None):
            context = engine.request("s")
            prepared = engine.manager.prepare_store(keys, context)
            engine.manager.complete_store(prepared.keys_to_store, context)
            engine.manager.reset_cache()  # asserts that no job is left
        assert not engine.manager.has_pending_work()


def test_a_store_waits_for_room_rather_than_being_dropped(tmp_path: Path) -> None:
    """Trap 9: a store that was dropped is not offered again while its chunk stays in the CPU tier."""
    keys = keys_of("a", 24)
    with open_well() as well, offloading(tmp_path, well) as engine:
        reserve, refusals = type(well.hierarchy.arena).reserve, [3]

        def full(*args: Any, **more: Any) -> Any:
            refusals[0] -= 1
            return None if refusals[0] >= 0 else reserve(*args, **more)

        with patch.object(type(well.hierarchy.arena), "reserve", full):
            engine.store(keys)
        assert refusals[0] < 0
        engine.forget()
        assert engine.hits(keys, engine.request("r")) == 24


def test_backpressure_stands_before_our_stores(tmp_path: Path) -> None:
    """Trap 10: a detector of vLLM's may drop stores before we see them."""
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    with offloading(tmp_path, tier={"backpressure": {"backpressure_cls": "EMABackpressureDetector"}}) as engine:
        assert isinstance(engine.tier.bp_detector, BackpressureDetector)
        with patch.object(type(engine.tier.bp_detector), "should_store", lambda detector, blocks: False):
            engine.store(keys_of("a", 3))
        engine.forget()
        assert engine.hits(keys_of("a", 3), engine.request("r")) == 0


def test_other_weights_are_another_namespace(tmp_path: Path) -> None:
    """Trap 11: vLLM's config names the model, and says nothing of its weights."""
    keys = keys_of("a", 3)
    with open_well() as well:
        for weights, hits in (("w1", 0), ("w2", 0), ("w1", 3)):
            with offloading(tmp_path, well, tier={"weights_id": weights}) as engine:
                context = engine.request("r")
                assert engine.hits(keys, context) == hits
                engine.finish(context)
                engine.store(keys)


def test_a_reset_begins_a_new_epoch(tmp_path: Path) -> None:
    """Trap 11: vLLM drains a tier where weights may have changed, and keeps what it holds."""
    keys = keys_of("a", 3)
    with open_well() as well:
        with offloading(tmp_path, well) as engine:
            engine.store(keys)
            engine.reset()
            assert engine.hits(keys, engine.request("r")) == 0
            engine.store(keys, "s2")
            engine.forget()
            assert engine.hits(keys, engine.request("r2")) == 3
        with offloading(tmp_path, well) as engine:  # a new start has the weights of the files again
            assert engine.hits(keys, engine.request("r3")) == 3


def test_weights_that_change_without_a_reset_are_not_seen(tmp_path: Path) -> None:
    """Trap 11, a limit that the docs name: the interface tells a tier of no change but by a reset of caches."""
    keys = keys_of("a", 3)
    with offloading(tmp_path) as engine:
        engine.store(keys)
        engine.forget()
        assert engine.hits(keys, engine.request("r")) == 3  # whatever the model has become meanwhile


def test_what_a_client_of_the_api_sends_is_not_trusted(tmp_path: Path) -> None:
    """Trap 12: `kv_transfer_params` come from the public request body."""
    keys = keys_of("a", 3)
    with offloading(tmp_path) as engine:
        engine.store(keys)
        engine.forget()
        context = ReqContext("r", kv_transfer_params={"tenant": "other", "recall": "never", "epoch": 7})
        engine.manager.on_new_request(context)
        assert engine.hits(keys, context) == 3


def test_chunks_of_two_cache_groups_are_told_apart(tmp_path: Path) -> None:
    """Trap 13: a key is the hash and the number of the group; the hash alone is the same."""
    first, second = keys_of("a", 3, group=0), keys_of("a", 3, group=1)
    assert [key[:-4] for key in first] == [key[:-4] for key in second]
    with offloading(tmp_path) as engine:
        engine.store(first)
        engine.forget()
        assert engine.hits(second, engine.request("r")) == 0
        engine.store(second, "s2")
        engine.forget()
        context = engine.request("r2")
        assert engine.hits([*first, *second], context) == 6
        engine.assert_loaded([*first, *second], context)


def test_a_long_prompt_is_one_question(tmp_path: Path) -> None:
    """Trap 14: thousands of lookups in a pass, at each step while they are deferred."""
    keys = keys_of("a", 2000)
    with offloading(tmp_path, rows=16) as engine:
        client = engine.tier._session.client  # type: ignore[union-attr]
        ask, asked = client.ask, []
        with patch.object(
            client, "ask", lambda digests, *rest: asked.append(len(digests) // 32) or ask(digests, *rest)
        ):
            assert engine.hits(keys, engine.request("r")) == 0
        assert asked == [2000]


def test_a_prompt_beyond_the_cpu_tier_is_no_livelock(tmp_path: Path) -> None:
    """Beyond the list: rows promoted for a request are evicted by its own next ones, over and over."""
    keys = keys_of("a", 24)
    with open_well() as well:
        with offloading(tmp_path, well, rows=32) as engine:
            engine.store(keys)
        with offloading(tmp_path, well, rows=16) as engine:
            context = engine.request("r")
            hits = engine.hits(keys, context)
            assert 0 < hits <= 16 * MAX_PROMOTED
            engine.assert_loaded(keys[:hits], context)


def test_content_differs_by_key() -> None:
    """The tests above compare bytes that tell chunks apart."""
    keys = keys_of("a", 3) + keys_of("b", 3) + keys_of("a", 3, group=1)
    assert len({content(key, 4096).tobytes() for key in keys}) == len(keys)
