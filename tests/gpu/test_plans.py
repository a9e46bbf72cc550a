"""Random copies and work of the engine in one stream of orders, against the same done one after the other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.bench.gpu.engine.kv import COMPACT, Kv, Layout, Shape
from stepwell.engines.paged import open_copies
from stepwell.engines.paged.base import Copying

from .conftest import registered
from .ways import Mirror, each_way, shards

PAGES, EACH, SLOTS = 24, 2, 6
ORDERS = st.lists(st.tuples(st.sampled_from(["gather", "scatter", "write"]), st.integers(0, 1 << 30)), max_size=14)


@pytest.mark.parametrize("layout", COMPACT, ids=lambda layout: layout.value)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=ORDERS)
def test_whatever_runs_beside_what_the_result_is_that_of_the_order(
    device: str, layout: Layout, orders: list[tuple[str, int]]
) -> None:
    kv = Kv.make(Shape(2, PAGES, 2, 64, 128), layout, device)
    copies = open_copies(kv.caches, PAGES)
    with registered(copies, SLOTS * EACH * copies.page_bytes) as slab:
        slots = slab.bytes.reshape(SLOTS, EACH * copies.page_bytes)
        for way in each_way(copies):
            kv.fill(4)
            slots[:] = 9
            mirror, expected = Mirror(kv), slots.copy()
            using: dict[int, Copying] = {}
            for what, seed in orders:
                dice = random.Random(seed)
                pages = dice.sample(range(PAGES), 2 * EACH)
                if what == "write":
                    copies.hold_back(pages)
                    kv.poison(pages, seed % 256)
                    for page in pages:
                        mirror.put(page, np.full(copies.page_bytes, seed % 256, np.uint8))
                    continue
                chosen = dice.sample(range(SLOTS), 2)
                for slot in chosen:  # who may use a slot is not the copies' business
                    if slot in using:
                        using[slot].wait()
                rows = expected.reshape(SLOTS * EACH, -1)
                parts = shards(slots, pages, EACH)
                parts = [one._replace(slot=one.slot._replace(number=n)) for one, n in zip(parts, chosen, strict=True)]
                copying = (copies.gather if what == "gather" else copies.scatter)(parts, copies.now())
                using.update(dict.fromkeys(chosen, copying))
                for place, page in enumerate(pages):
                    row = chosen[place // EACH] * EACH + place % EACH
                    if what == "gather":
                        rows[row] = mirror.page(page)
                    else:
                        mirror.put(page, rows[row])
            for copying in using.values():
                copying.wait()
            assert mirror.differing() == 0, way
            assert np.array_equal(slots, expected), way
    copies.close()
