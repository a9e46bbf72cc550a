"""A copy that takes long, and an engine that writes its pages as soon as it may."""

from __future__ import annotations

import pytest
import torch

from lab.bench.gpu.engine.kv import Kv, Layout, Shape
from stepwell.engines.paged import open_copies

from .conftest import registered
from .ways import Mirror, each_way, shards

EACH = 4


def large(device: str) -> Kv:
    """Copying it takes milliseconds, far longer than handing over what follows."""
    kv = Kv.make(Shape(4, 1024 if device == "cuda" else 64, 8, 16, 256), Layout.LBHNC, device)
    kv.fill(8)
    return kv


def test_pages_that_are_held_back_are_not_overwritten_under_a_copy(device: str) -> None:
    kv = large(device)
    pages = list(range(kv.shape.pages))
    copies = open_copies(kv.caches, kv.shape.pages)
    with registered(copies, len(pages) * copies.page_bytes) as slab:
        slots = slab.bytes.reshape(-1, EACH * copies.page_bytes)
        for way in each_way(copies):
            kv.fill(8)
            mirror = Mirror(kv)
            copying = copies.gather(shards(slots, pages, EACH), copies.now())
            copies.hold_back(pages)
            kv.poison(pages)
            copying.wait()
            rows = slots.reshape(len(pages), -1)
            assert all(rows[page].tobytes() == mirror.page(page).tobytes() for page in pages), way
            assert all((layer == 0xA5).all() for layer in kv.words)
    copies.close()


def test_a_recall_comes_after_the_step_that_wrote_its_pages_before_and_before_the_next_one(device: str) -> None:
    kv = large(device)
    pages = list(range(kv.shape.pages))
    copies = open_copies(kv.caches, kv.shape.pages)
    with registered(copies, len(pages) * copies.page_bytes) as slab:
        slots = slab.bytes.reshape(-1, EACH * copies.page_bytes)
        slots[:] = 3
        for way in each_way(copies):
            kv.poison(pages)
            copying = copies.scatter(shards(slots, pages, EACH), copies.now())
            copies.hold_back(pages[:8])
            kv.poison(pages[:8], 0x11)
            copying.wait()
            if device == "cuda":
                torch.cuda.synchronize()
            assert all((layer[:8] == 0x11).all() and (layer[8:] == 3).all() for layer in kv.words), way
    copies.close()


def test_copies_go_on_while_a_graph_is_captured(device: str) -> None:
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    import threading

    kv = large(device)
    pages = list(range(kv.shape.pages))
    copies = open_copies(kv.caches, kv.shape.pages)
    errors: list[Exception] = []
    with registered(copies, len(pages) * copies.page_bytes) as slab:
        slots = slab.bytes.reshape(-1, EACH * copies.page_bytes)
        after, over = copies.now(), threading.Event()
        begun = threading.Event()

        def copy() -> None:
            try:
                while not over.is_set():
                    with registered(copies, 1 << 20):
                        copies.gather(shards(slots, pages, EACH), after).wait()
                    begun.set()
            except Exception as error:  # noqa: BLE001 - looked at below
                errors.append(error)
                begun.set()

        thread = threading.Thread(target=copy)
        thread.start()
        begun.wait(60)
        numbers = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(200):
                    numbers += 1
        finally:
            over.set()
            thread.join(60)
        graph.replay()
        torch.cuda.synchronize()
        assert not errors
        assert (numbers == 200).all()
    copies.close()
