"""Faults: forwards that raise, slots that change, clients that raise, wells that are lost. The engine serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.client.scheduler import SchedulerClient
from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.paged.cpu import Copied

from .local import Engine, engine, late, open_well, prompt, setup_in
from .worker import ForwardFailed


@pytest.mark.parametrize("runner_v2", [False, True])
def test_half_a_forward_is_never_recalled(tmp_path: Path, runner_v2: bool) -> None:
    with engine(tmp_path, batch_tokens=128, runner_v2=runner_v2) as h:
        h.add(prompt(400))
        h.step()
        h.step()
        before = h.stat("blocks")
        h.fail_forward_next(layer=0)
        with pytest.raises(ForwardFailed):
            h.step()
        assert h.stat("blocks") == before, "nothing of that step is kept"
        h.restart_engine()
        seen = h.serve(prompt(400), max_tokens=3)
        assert seen.external <= 256 and h.right(seen)
        h.assert_quiet()


def test_the_first_rank_ends_the_step_and_the_second_raises(tmp_path: Path) -> None:
    with engine(tmp_path, ranks=2, batch_tokens=128) as h:
        h.add(prompt(400))
        h.step()
        h.fail_forward_next(layer=1, rank=1)
        with pytest.raises(ForwardFailed):
            h.run()
        h.restart_engine(kill=True)
        h.well.check()
        seen = h.serve(prompt(400), max_tokens=3)
        assert seen.external == 0 and h.right(seen)
        h.assert_clean()


@pytest.mark.parametrize(("policy", "block"), [(None, 0), (None, 4), ("fail", 11), ("recompute", 0)])
def test_a_spoilt_slot_is_recomputed_whatever_the_policy(tmp_path: Path, policy: str | None, block: int) -> None:
    """vLLM's default for a failed load is to fail the request."""
    with engine(tmp_path, load_failure_policy=policy) as h:
        h.serve(prompt(200))
        h.forget()
        steps = h.steps
        with h.spoiled(block):
            seen = h.serve(prompt(200), max_tokens=3)
        assert h.right(seen) and sum(h.failures.values()) == 12 - block
        assert h.steps - steps < 15, "a bad block is not offered again and again"
        assert seen.computed == 200 + 2 - 16 * block
        assert h.recall(prompt(200)).external == 192, "spilled anew"
        h.assert_quiet()


def test_a_slot_that_is_reused_while_it_is_read(tmp_path: Path) -> None:
    """Its generation is looked at after the copy too: what was copied may be another block by then."""
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        copies = h.workers[0].connector._work._copies
        scatter, entries = copies.scatter, h.entries()

        def reused(shards: Any, after: Any) -> Any:
            slab, number = entries[4].slots[0]
            slab.renew(number)
            shards[4].slot.bytes[:] = 77
            return scatter(shards, after)

        copies.scatter = reused
        seen = h.serve(prompt(200), max_tokens=3)
        assert h.right(seen) and seen.computed == 200 + 2 - 64
        h.assert_quiet()


def test_a_slab_that_is_gone_on_one_rank(tmp_path: Path) -> None:
    with engine(tmp_path, ranks=2) as h:
        h.serve(prompt(200))
        h.forget()
        slabs = h.worker_clients[1]._slabs._known
        kept = dict(slabs)
        slabs.clear()
        seen = h.serve(prompt(200), max_tokens=3)
        assert h.right(seen) and sum(h.failures.values()) == 12
        slabs.update(kept)
        h.assert_quiet()


def test_nothing_is_stored_from_pages_whose_load_failed(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        for tail in range(4):
            h.forget()
            with h.spoiled(3 + tail):
                assert h.right(h.serve(prompt(200) + prompt(60, seed=5 + tail), max_tokens=20))
        for tail in range(4):
            assert h.right(h.recall(prompt(200) + prompt(60, seed=5 + tail), max_tokens=20))
        h.assert_quiet()


def test_a_load_that_always_fails_ends(tmp_path: Path) -> None:
    """Even if the well keeps the block that failed: a request is offered no second load before it has run."""
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        h.client.forget = lambda *args: None
        with h.spoiled(0):
            rid = h.add(prompt(200), max_tokens=3)
            h.run(20)
        assert h.right(h.requests[rid])
        h.assert_clean()


SCHEDULER = ["ask", "settle", "offer", "recall", "release", "reserve", "abandon", "forget", "count"]
WORKER = ["hold", "verify", "filled", "recalled"]


@pytest.mark.parametrize(("method", "after"), [*((name, 0) for name in [*SCHEDULER, *WORKER, "slot"]), ("recall", 1)])
def test_a_client_that_raises_costs_no_request(tmp_path: Path, method: str, after: int) -> None:
    """`after`: how many calls go well before all others raise."""
    kind = SchedulerClient if method in SCHEDULER else WorkerClient if method in WORKER else Hold
    original, calls = getattr(kind, method), [0]

    def raises(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise ValueError(f"{method} raised on purpose")
        return original(*args, **kwargs)

    with engine(tmp_path, num_pages=61, max_seqs=4) as h:
        h.serve(prompt(200))
        h.forget()
        with patch.object(kind, method, raises):
            ids = [h.add(prompt(200) + prompt(40, seed), max_tokens=30) for seed in range(4)]
            granted, h.client._granted = h.client._granted, lambda message: None
            for _ in range(4):
                h.step()
            for request in h.scheduler.running[-2:]:
                h.preempt(request.request_id)  # with blocks that were reserved and not granted yet
            h.step()
            h.client._granted = granted
            h.abort(ids[3])
            h.run()
            for seed in (5, 6):
                h.forget()
                with h.spoiled(*range(len(h.entries()))):
                    ids.insert(0, h.add(prompt(200) + prompt(16, seed), max_tokens=4))
                    h.run()
        assert calls[0] > after
        assert all(h.right(h.requests[rid]) for rid in ids[:-1])
        h.assert_clean()
        assert h.half.tracked == 0
        assert h.right(h.recall(prompt(200), max_tokens=3)), "and goes on"
        h.assert_clean()


@pytest.mark.parametrize("what", ["now", "put", "scatter", "start_load_kv"])
def test_no_load_is_lost_whatever_always_raises(tmp_path: Path, what: str) -> None:
    """What raises before a load's copies begin, and a vLLM that does not call the hook that begins them."""
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        half = h.workers[0].connector._work
        half._copies.inline_bytes = 0 if what == "put" else half._copies.inline_bytes
        of = {"now": half._copies, "scatter": half._copies, "put": half._in, "start_load_kv": h.workers[0].connector}[
            what
        ]
        answer: dict[str, Any] = {"return_value": None} if what == "start_load_kv" else {"side_effect": RuntimeError()}
        with patch.object(of, what, **answer):
            rid = h.add(prompt(200), max_tokens=3)
            h.run(50)
            parked = h.add([*prompt(200), *prompt(40, seed=2)])
            h.step()
            h.abort(parked)
            h.run(50)
        assert h.right(h.requests[rid]) and h.requests[rid].computed > 200
        assert h.request(parked) is None
        assert h.right(h.recall(prompt(200), max_tokens=3))
        h.assert_quiet()


def test_a_load_is_not_failed_before_its_copies_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages would be another's, or be computed, while they are still written."""
    monkeypatch.setattr("stepwell.engines.common.loads.PART_BYTES", 1)
    with late(None), engine(tmp_path) as h:
        h.serve(prompt(200))
        h.settle()
        h.forget()
        copies = h.workers[0].connector._work._copies
        scatter, calls = copies.scatter, [0]

        def second_raises(shards: Any, after: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise RuntimeError("on purpose")
            return scatter(shards, after)

        with patch.object(copies, "scatter", second_raises):
            rid = h.add(prompt(200), max_tokens=3)
            for _ in range(10):
                h.step()
            assert calls[0] == 2 and h.status(rid) == "WAITING_FOR_REMOTE_KVS", "the first one still copies"
            h.settle()
        for _ in range(10):
            h.step()
        h.settle()
        h.run()
        assert h.right(h.requests[rid]) and h.requests[rid].computed > 200
        h.assert_quiet()


def test_pages_that_are_copied_are_held_back_though_saving_raises(tmp_path: Path) -> None:
    """Copies of the step before still read them."""
    with late(None), engine(tmp_path, num_pages=25) as h:
        h.serve(prompt(200))
        h.forget()
        half = h.workers[0].connector._work
        with patch.object(half, "_save", side_effect=RuntimeError("on purpose")):
            h.serve(prompt(300, seed=2))
        h.settle()
        h.forget()
        rid = h.add(prompt(200), max_tokens=3)
        for _ in range(20):
            h.step()
            h.settle()
        h.run()
        assert h.right(h.requests[rid]) and h.requests[rid].external == 192
        h.assert_quiet()


def test_a_hook_without_its_arguments_costs_no_request(tmp_path: Path) -> None:
    """A scheduler output of a vLLM that we do not know: all requests go on without stepwell."""
    with engine(tmp_path, batch_tokens=64) as h:
        rid = h.add(prompt(300), max_tokens=40)
        h.step()
        with patch.object(type(h.half), "_observe", side_effect=AttributeError("no such field")):
            h.step()  # the pages that it appended are not known
        h.run()
        assert h.right(h.requests[rid])
        assert h.right(h.recall([*prompt(300), *h.requests[rid].tokens], max_tokens=3))
        h.assert_quiet()


def test_an_engine_killed_while_it_spills(tmp_path: Path) -> None:
    """Its slots are in quarantine until it has exited; nothing of it is ever published."""
    with engine(tmp_path, ranks=2) as h:
        links = [client.membership.outbox._link for client in (h.client, *h.worker_clients)]
        h.worker_clients[1].filled = lambda *args: None  # killed before the second rank says so
        h.add(prompt(200))
        h.step()
        h.step()
        assert h.stat("filling") == 12
        h.restart_engine(kill=True)
        assert h.serve(prompt(200), max_tokens=2).external == 0
        h.well.leave(links[0].member, exited=True)
        assert h.stat("quarantined_slots") == 24, "the scheduler copies nothing, its workers may"
        h.well.leave(links[1].member, exited=True)
        assert h.stat("quarantined_slots") == 24
        assert h.recall(prompt(200), max_tokens=2).external == 0
        assert h.recall(prompt(200), max_tokens=2).external == 192
        h.well.leave(links[2].member, exited=True)
        h.assert_quiet()


def lose(h: Engine) -> None:
    """Every connection to the well breaks."""
    for client in (h.client, *h.worker_clients):
        outbox = client.membership.outbox
        if outbox is not None:
            outbox._link._well.leave(outbox._link.member, exited=False)
            outbox._link.end()


def rejoin(h: Engine) -> None:
    for client in (h.client, *h.worker_clients):
        assert client.membership.attempt()


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_a_lost_well_is_rejoined_with_nothing_stale(tmp_path: Path, scheduler_first: bool) -> None:
    with engine(tmp_path, ranks=2, batch_tokens=64) as h:
        h.serve(prompt(200))
        for at in range(8):
            h.forget()
            ids = [h.add(prompt(200) + prompt(90, seed=10 * at + n), max_tokens=20) for n in range(3)]
            for _ in range(at):
                h.step()
            lose(h)
            assert not h.client.live
            h.step()
            members = [h.client, *h.worker_clients]
            for client in members if scheduler_first else reversed(members):
                assert client.membership.attempt()
                h.step()  # while only some of its members are back
            assert h.client.live
            h.run()
            assert all(h.right(h.requests[rid]) for rid in ids)
            h.assert_quiet()
        # What was on its way when the well was lost is computed, and spilled again: again where this machine dallies,
        # since a request that has ended waits for its slots for so long only.
        assert any(h.recall(prompt(200)).external == 192 for _ in range(4))
        assert h.stat("blocks") > 12, "spills go on"


def test_without_a_well_the_engine_serves(tmp_path: Path) -> None:
    with open_well("32MiB") as well, Engine(setup_in(tmp_path), well) as h:
        h.serve(prompt(200))
        rid = h.add(prompt(200) + prompt(100, seed=2), max_tokens=20)
        h.step()
        h.well.close()
        h.run()
        seen = h.recall(prompt(200), max_tokens=3)
        assert h.right(h.requests[rid]) and h.right(seen) and seen.external == 0
        assert h.counted("missed_no_session") >= 1
        h.assert_clean()
        assert not h.half.tracked


def test_what_was_planned_for_a_lost_well_does_not_touch_the_next(tmp_path: Path) -> None:
    """A new well counts its slabs, slots and leases from the start, as the lost one did."""
    with open_well("32MiB") as first, Engine(setup_in(tmp_path, num_pages=30, max_seqs=2), first) as h:
        h.serve(prompt(200))
        h.forget()
        busy = h.add(prompt(300, seed=3), max_tokens=100)
        h.step()
        offered = h.add(prompt(200), max_tokens=4)  # pinned, offered, and waiting for pages
        h.step()
        assert h.status(offered) == "WAITING"
        first.close()
        with open_well("32MiB") as second:
            with Engine(setup_in(tmp_path / "other", extra={"weights_id": "w"}), second) as other:
                other.serve(prompt(200, seed=8))  # the same slots, of other tokens
            for client in (h.client, *h.worker_clients):
                client.membership._find = lambda: second.dial
            rejoin(h)
            assert h.client.live
            h.run()
            assert h.right(h.requests[busy]) and h.right(h.requests[offered])
            h.assert_clean()
            h.well = second
            assert h.right(h.recall(prompt(200, seed=8), max_tokens=2))
            h.assert_quiet()


def test_stale_saves_and_acknowledgements_stay_away(tmp_path: Path) -> None:
    """A plan of a lost session neither writes slots nor ends leases of the present one."""
    with engine(tmp_path) as h:
        plans = []
        work = h.workers[0].connector._work
        end = work.end_of_step
        work.end_of_step = lambda plan: plans.append(plan) if plan.saves else end(plan)
        h.add(prompt(200), max_tokens=3)
        h.step()
        h.step()
        stale = plans[0]
        assert stale.saves
        lose(h)
        rejoin(h)
        work.end_of_step = end
        touched: list[Any] = []
        with (
            patch.object(h.worker_clients[0].membership.outbox, "post", touched.append),
            patch.object(work._copies, "gather", lambda shards, after: touched.extend(shards) or Copied(0.0)),
        ):
            work.end_of_step(stale)
        assert not touched
        assert h.stat("blocks") == 0
        h.run()
        h.assert_clean()


def test_what_belonged_to_a_lost_session_is_not_said_to_the_next(tmp_path: Path) -> None:
    """Lease numbers of one session may be those of another request's blocks in the next."""
    with engine(tmp_path) as h:
        h.add(prompt(200), max_tokens=3)
        h.step()
        assert h.half.live.spilling, "leased, not handed to the workers yet"
        lose(h)
        rejoin(h)
        said: list[Any] = []
        with patch.object(h.client.membership.outbox, "post", said.append):
            h.reset_prefix_cache(connector=True)  # gives up what is not saved
        assert not said
        h.run()
        h.assert_quiet()
