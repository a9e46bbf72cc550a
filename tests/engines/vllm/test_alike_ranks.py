"""Ranks that hold the same KV heads, as vLLM's real scheduler has them: stored once, recalled by all."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.errors import IntegrityError

from .build import KNOWS_REPLICAS
from .local import engine, prompt
from .test_faults import lose, rejoin

pytestmark = pytest.mark.skipif(not KNOWS_REPLICAS, reason="this vLLM does not tell which ranks hold the same")

ALIKE: dict[str, Any] = {"ranks": 2, "kv_heads": 1}
MIXED: dict[str, Any] = {"ranks": 4, "kv_heads": 2}
SHARD = 16 * 2 * 2 * 8 * 4
"""Bytes: 16 tokens, 2 layers, K and V of one head of 8 words of 4 bytes."""


@pytest.mark.parametrize(("setup", "shards"), [(ALIKE, 1), (MIXED, 2), ({"ranks": 2, "kv_heads": 2}, 2)])
def test_kv_that_ranks_hold_alike_is_stored_once(tmp_path: Path, setup: dict[str, Any], shards: int) -> None:
    with engine(tmp_path, **setup) as h:
        h.serve(prompt(200))
        assert (h.stat("blocks"), h.stat("block_bytes")) == (12, 12 * shards * SHARD)
        assert all(len(entry.slots) == shards for entry in h.entries())
        seen = h.recall(prompt(200), max_tokens=30)
        assert h.right(seen) and seen.external == 192
        assert seen.kv_transfer_params is not None
        assert seen.kv_transfer_params["stepwell"]["bytes"] == {"host": 12 * shards * SHARD}
        h.assert_quiet()


def test_only_the_first_of_them_writes(tmp_path: Path) -> None:
    with engine(tmp_path, **MIXED) as h:
        said: list[int] = []
        for rank, client in enumerate(h.worker_clients):
            filled = client.filled
            client.filled = lambda *args, rank=rank, filled=filled: (said.append(rank), filled(*args))
        silent = [h.workers[rank].connector._work._copies for rank in (1, 3)]
        with (
            patch.object(silent[0], "gather", side_effect=OSError("on purpose")),
            patch.object(silent[1], "gather", side_effect=OSError("on purpose")),
        ):
            h.serve(prompt(200))
        assert h.stat("blocks") == 12
        with patch.object(h.workers[2].connector._work._copies, "gather", side_effect=OSError("on purpose")):
            h.serve(prompt(200, seed=2))
        assert h.stat("blocks") == 12, "what one who writes cannot copy is nobody's"
        assert h.recall(prompt(200)).external == 192
        assert set(said) == {0, 2}
        h.assert_quiet()


@pytest.mark.parametrize("rank", range(4))
def test_a_load_that_fails_on_any_rank_has_failed(tmp_path: Path, rank: int) -> None:
    with engine(tmp_path, **MIXED) as h:
        h.serve(prompt(200))
        h.forget()

        def changed(*args: Any) -> None:
            raise IntegrityError("SW-302", what="on purpose", why="", fix="")

        with patch.object(h.worker_clients[rank], "verify", changed):
            seen = h.serve(prompt(200), max_tokens=3)
        assert h.right(seen) and sum(h.failures.values()) == 12
        assert h.right(h.recall(prompt(200), max_tokens=3))
        h.assert_quiet()


@pytest.mark.parametrize("rank", [0, 3])
def test_the_loss_of_a_rank(tmp_path: Path, rank: int) -> None:
    """In each step of requests that recall and spill: nothing wrong, nothing left, and it goes on afterwards."""
    with engine(tmp_path, batch_tokens=64, **MIXED) as h:
        h.serve(prompt(200))
        for at in range(6):
            h.forget()
            ids = [h.add(prompt(200) + prompt(90, seed=10 * at + n), max_tokens=20) for n in range(2)]
            for _ in range(at):
                h.step()
            outbox = h.worker_clients[rank].membership.outbox
            outbox._link._well.leave(outbox._link.member, exited=False)
            outbox._link.end()
            assert not h.client.live
            h.step()
            rejoin(h)
            h.run()
            assert h.client.live and all(h.right(h.requests[rid]) for rid in ids)
            h.assert_quiet()
        h.recall(prompt(200))
        assert h.recall(prompt(200)).external == 192


def test_canaries_look_at_what_each_rank_computes(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"canary": 1}, **ALIKE) as h:
        h.serve(prompt(300))
        h.recall(prompt(300), max_tokens=20)
        assert (h.stat("canaries_clean"), h.stat("canaries_mismatched")) == (1, 0)
        h.assert_quiet()


def test_a_lost_well_is_rejoined(tmp_path: Path) -> None:
    with engine(tmp_path, **ALIKE) as h:
        h.serve(prompt(200))
        lose(h)
        h.serve(prompt(200, seed=2))
        rejoin(h)
        assert h.recall(prompt(200), max_tokens=3).external == 192
        h.assert_quiet()
