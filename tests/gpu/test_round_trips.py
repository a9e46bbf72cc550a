"""What goes out comes back bit for bit, and nothing else is touched: every layout, dtype, page size and run length."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lab.bench.gpu.engine.kv import COMPACT, DTYPES, Kv, Layout, Shape
from stepwell.engines.paged import open_copies
from stepwell.errors import Unsupported

from .conftest import registered
from .ways import Mirror, each_way, shards

PAGES, EACH, COUNT = 48, 4, 20
ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "consecutive": lambda pages: pages[:COUNT],
    "every second": lambda pages: pages[::2][:COUNT],
    "descending": lambda pages: pages[::-1][:COUNT],
    "random": lambda pages: random.Random(3).sample(pages, COUNT),
    "runs and jumps": lambda pages: [*pages[7:12], *pages[30:20:-2], *pages[40:45], *pages[0:5]],
}


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", COMPACT, ids=lambda layout: layout.value)
def test_every_byte_comes_back_and_no_other_changes(device: str, layout: Layout, dtype: str, page: int) -> None:
    pad = 64 if page == 64 else 0
    kv = Kv.make(Shape(3, PAGES, 2, page, 16, dtype, pad), layout, device)
    kv.fill(page)
    copies = open_copies(kv.caches, PAGES)
    assert copies.page_bytes == kv.shape.page_bytes
    with registered(copies, COUNT * copies.page_bytes) as slab:
        slots = slab.bytes.reshape(-1, EACH * copies.page_bytes)
        for way in each_way(copies):
            for order, choose in ORDERS.items():
                where = f"{way}, {order}"
                mirror = Mirror(kv)
                sources = choose(list(range(PAGES)))
                targets = choose(list(range(PAGES)))[::-1]
                copies.gather(shards(slots, sources, EACH), copies.now()).wait()
                stored = [mirror.page(number) for number in sources]
                assert [slots.reshape(COUNT, -1)[n].tobytes() for n in range(COUNT)] == [s.tobytes() for s in stored]
                copies.scatter(shards(slots, targets, EACH), copies.now()).wait()
                for number, content in zip(targets, stored, strict=True):
                    mirror.put(number, content)
                assert mirror.differing() == 0, where
    copies.close()


@pytest.mark.parametrize("layout", COMPACT, ids=lambda layout: layout.value)
def test_a_load_may_begin_inside_a_block_and_end_inside_one(device: str, layout: Layout) -> None:
    kv = Kv.make(Shape(2, PAGES, 2, 16, 32), layout, device)
    kv.fill(1)
    copies = open_copies(kv.caches, PAGES)
    with registered(copies, COUNT * copies.page_bytes) as slab:
        slots = slab.bytes.reshape(-1, EACH * copies.page_bytes)
        slots[:] = 7
        for _ in each_way(copies):
            mirror = Mirror(kv)
            first, middle, last = shards(slots, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], EACH)
            parts = [first._replace(skip=3, pages=[1]), middle, last._replace(pages=[9, 10])]
            copies.scatter(parts, copies.now()).wait()
            for number in (1, 5, 6, 7, 8, 9, 10):
                mirror.put(number, slots.reshape(COUNT, -1)[0])
            assert mirror.differing() == 0
    copies.close()


@pytest.mark.parametrize("layout", [Layout.LHBNC, Layout.BHLNC], ids=lambda layout: layout.value)
def test_pages_that_are_not_compact_are_refused(device: str, layout: Layout) -> None:
    kv = Kv.make(Shape(2, 8, 2, 16, 32), layout, device)
    with pytest.raises(Unsupported, match="SW-707"):
        open_copies(kv.caches, 8)


def test_what_is_fetched_is_what_is_in_the_pages(device: str) -> None:
    kv = Kv.make(Shape(2, PAGES, 1, 16, 32), Layout.LBNHC, device)
    kv.fill(2)
    copies = open_copies(kv.caches, PAGES)
    for _ in each_way(copies):
        fetched = copies.fetch([5, 3, 40], copies.now())
        fetched.copying.wait()
        assert [row.tobytes() for row in fetched.bytes] == [Mirror(kv).page(n).tobytes() for n in (5, 3, 40)]
    copies.close()
