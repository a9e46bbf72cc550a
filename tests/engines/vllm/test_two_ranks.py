"""An engine of two workers: nothing is published, confirmed or given up before both have spoken."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.client.worker import Hold
from stepwell.errors import IntegrityError

from .local import Engine, engine, open_well, prompt, setup_in
from .test_lifetimes import SlowCopy


class Late:
    """What a worker tells the well waits until `tell`."""

    def __init__(self, client: Any) -> None:
        self._client, self._filled, self._calls = client, client.filled, []
        client.filled = lambda *args: self._calls.append(args)

    def tell(self) -> None:
        self._client.filled = self._filled
        for args in self._calls:
            self._filled(*args)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_block_is_published_when_all_ranks_have_filled_it(tmp_path: Path, slow: int) -> None:
    with (
        open_well("32MiB") as well,
        Engine(setup_in(tmp_path, ranks=2), well) as a,
        Engine(setup_in(tmp_path, ranks=2), well) as b,
    ):
        late = Late(a.worker_clients[slow])
        a.serve(prompt(200))
        assert (a.stat("blocks"), a.stat("filling")) == (0, 12)
        assert b.serve(prompt(200)).external == 0
        late.tell()
        assert a.stat("blocks") == 12
        assert b.recall(prompt(200)).external == 192
        a.assert_quiet()
        b.assert_quiet()


@pytest.mark.parametrize("error", [IntegrityError("SW-302", what="on purpose", why="", fix=""), IndexError(7)])
def test_a_block_that_one_rank_drops_is_nobodys(tmp_path: Path, error: Exception) -> None:
    with engine(tmp_path, ranks=2) as h:
        client = h.worker_clients[1]
        hold, calls = client.hold, []

        def that_fails() -> Hold:
            made = hold()
            slot = made.slot

            def third_fails(*args: Any) -> Any:
                calls.append(args)
                if len(calls) == 3:
                    raise error
                return slot(*args)

            made.slot = third_fails
            return made

        client.hold = that_fails
        h.serve(prompt(200))
        assert h.stat("blocks") == 11
        assert h.recall(prompt(200)).external == 32
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


def test_a_step_of_blocks_that_one_rank_cannot_copy_is_nobodys(tmp_path: Path) -> None:
    with engine(tmp_path, ranks=2) as h:
        copies = h.workers[1].connector._work._copies
        with patch.object(copies, "gather", side_effect=OSError("on purpose")):
            h.serve(prompt(200))
        assert h.stat("blocks") == 0
        assert h.serve(prompt(200)).external == 0
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_has_failed(tmp_path: Path, rank: int) -> None:
    with engine(tmp_path, ranks=2) as h:
        h.serve(prompt(200))
        h.forget()
        with h.spoiled(5, rank=rank):
            seen = h.serve(prompt(200), max_tokens=3)
        assert h.right(seen) and seen.computed == 200 + 2 - 80
        assert seen.kv_transfer_params is not None
        assert seen.kv_transfer_params["stepwell"]["recalled_tokens"] == 80
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("spoiled", [None, 0, 5])
def test_ranks_report_in_different_steps(tmp_path: Path, slow: int, spoiled: int | None) -> None:
    with engine(tmp_path, ranks=2) as h:
        h.serve(prompt(200))
        h.forget()
        h.hold(slow)
        blocks = [] if spoiled is None else [spoiled]
        with h.spoiled(*blocks, rank=1 - slow):
            rid = h.add(prompt(200), max_tokens=3)
            other = h.add(prompt(100, seed=2), max_tokens=20)
            for _ in range(8):
                h.step()
            assert h.status(rid) == "WAITING_FOR_REMOTE_KVS"
            h.release(slow)
            h.run()
        assert h.right(h.requests[rid]) and h.right(h.requests[other])
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


def test_no_step_is_confirmed_by_one_rank(tmp_path: Path) -> None:
    with engine(tmp_path, ranks=2) as h:
        h.hold(1)
        h.add(prompt(200), max_tokens=100)
        for _ in range(10):
            h.step()
        assert h.stat("filling") == 13, "reserved, not copied"
        h.release(1)
        h.run()
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


def test_an_abort_while_one_rank_still_copies(tmp_path: Path) -> None:
    with engine(tmp_path, ranks=2) as h:
        h.serve(prompt(200))
        h.forget()
        h.hold(1)
        rid = h.add(prompt(200))
        for _ in range(3):
            h.step()
        h.abort(rid)
        for _ in range(3):
            h.step()
        assert h.request(rid) is not None, "its pages are held"
        h.release(1)
        h.run()
        h.assert_quiet()


def test_slow_copies_on_both_ranks(tmp_path: Path) -> None:
    with engine(tmp_path, ranks=2) as h:
        h.serve(prompt(200))
        h.forget()
        with SlowCopy(h) as copy:
            ids = [h.add(prompt(200)[: 40 * n], max_tokens=10) for n in (3, 4, 5)]
            h.run_until(copy.begun.is_set)
            for _ in range(5):
                h.step()
            assert all(h.requests[rid].finish_reason is None for rid in ids)
            copy.go.set()
            h.run()
        assert all(h.right(h.requests[rid]) for rid in ids)
        h.assert_quiet()
