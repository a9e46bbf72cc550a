"""The pool has the pages that it says it has, byte for byte."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from stepwell.longctx.kv.pool import PagePool
from stepwell.longctx.shape import PageShape

SHAPE = PageShape(heads=2, group=1, tokens=3, key_dim=4, value_dim=2)
LANES, PAGES = 2, 12


def contents(lanes, pages):
    """What page `pages[i]` of lane `lanes[i]` holds: a number of its own."""
    own = (lanes * 100 + pages + 1).float()
    return own.view(-1, 1, 1, 1).expand(-1, 2, 3, 4), -own.view(-1, 1, 1, 1).expand(-1, 2, 3, 2)


@given(st.data())
def test_against_a_plain_model(data):
    slots = data.draw(st.integers(0, 6))
    pool, held = PagePool(SHAPE, LANES, slots, torch.float32, torch.device("cpu")), [set() for _ in range(LANES)]
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["keep", "keep", "keep", "crop", "rows", "resize", "fail"]))
        if what in ("keep", "fail"):
            wanted = [data.draw(st.sets(st.integers(0, PAGES - 1), max_size=pool.slots)) for _ in range(LANES)]
            keep = torch.zeros(LANES, PAGES, dtype=torch.bool)
            for lane, pages in enumerate(wanted):
                keep[lane, sorted(pages)] = True
            change = pool.exchange(keep)
            if what == "fail":  # what was to come in never came
                half = len(change.lanes) // 2
                change = change.only(slice(0, half))
            pool.install(change, *contents(change.lanes, change.pages))
            came = [set() for _ in range(LANES)]
            for lane, page in zip(change.lanes.tolist(), change.pages.tolist(), strict=True):
                came[lane].add(page)
            held = [(old & new) | fresh for old, new, fresh in zip(held, wanted, came, strict=True)]
        elif what == "crop":
            left = data.draw(st.integers(0, PAGES))
            pool.crop(left)
            held = [{page for page in pages if page < left} for pages in held]
        elif what == "rows":
            pool.rows(torch.tensor([1, 1]))
            pool.keys[0], pool.values[0] = pool.keys[0] - 100, pool.values[0] + 100  # as if it were lane 0's own
            held = [set(held[1]), set(held[1])]
        else:
            pool.resize(data.draw(st.integers(0, 6)))
            held = [{page for page in pages if page in pool.pages[lane].tolist()} for lane, pages in enumerate(held)]
        resident = pool.resident(PAGES)
        assert [set(resident[lane].nonzero().flatten().tolist()) for lane in range(LANES)] == held
        for lane in range(LANES):
            for slot, page in enumerate(pool.pages[lane].tolist()):
                if page >= 0:
                    own = lane * 100 + page + 1
                    assert (pool.keys[lane, :, slot * 3 : slot * 3 + 3] == own).all()
                    assert (pool.values[lane, :, slot * 3 : slot * 3 + 3] == -own).all()
        some = torch.rand(LANES, PAGES) < 0.5
        tokens, positions = pool.tokens_of(some), pool.positions()
        for lane in range(LANES):
            expected = {3 * page + at for page in held[lane] if some[lane, page] for at in range(3)}
            assert set(positions[lane][tokens[lane]].tolist()) == expected
