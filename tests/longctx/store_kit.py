"""What every store of cold pages must do, checked against a dict: a machine for hypothesis, and the plain cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepwell.errors import CapacityError
from stepwell.longctx.store.base import PageStore

PAGES = 12
"""That every store under test has room for."""

_random = torch.Generator().manual_seed(1)


def pages(count: int, page_bytes: int) -> torch.Tensor:
    """Pages as nobody has put them before."""
    return torch.randint(0, 256, (count, page_bytes), dtype=torch.uint8, generator=_random)


class StoreMachine(RuleBasedStateMachine):
    """Subclasses set `make`: a new store with room for PAGES pages and no more."""

    make: ClassVar[Callable[[], PageStore]]

    @initialize()
    def begin(self) -> None:
        self.store = type(self).make()
        self.owners: Counter[int] = Counter()
        self.content: dict[int, torch.Tensor] = {}
        self.freed: set[int] = set()

    @rule(count=st.integers(0, PAGES + 1))
    def put(self, count: int) -> None:
        payload = pages(count, self.store.page_bytes)
        if count > PAGES - len(self.content):
            with pytest.raises(CapacityError) as raised:
                self.store.put(payload)
            assert raised.value.code == "SW-209"
            return
        places = self.store.put(payload)
        assert places.dtype == torch.int64 and places.shape == (count,)
        assert (places >= 0).all() and len(set(places.tolist())) == count
        assert not set(places.tolist()) & set(self.content)
        for place, page in zip(places.tolist(), payload, strict=True):
            self.owners[place], self.content[place] = 1, page.clone()
        self.freed -= set(self.content)
        payload.zero_()  # it is the caller's again

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.content)), max_size=2 * PAGES))
        got = self.store.get(torch.tensor(chosen, dtype=torch.int64))
        assert got.dtype == torch.uint8 and got.shape == (len(chosen), self.store.page_bytes)
        assert all(torch.equal(page, self.content[place]) for place, page in zip(chosen, got, strict=True))

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.content)), max_size=4))
        self.store.retain(torch.tensor(chosen, dtype=torch.int64))
        self.owners.update(chosen)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owned = data.draw(st.permutations(sorted(self.owners.elements())))
        chosen = owned[: data.draw(st.integers(0, len(owned)))]
        self.store.free(torch.tensor(chosen, dtype=torch.int64))
        self.owners -= Counter(chosen)
        self.freed |= {place for place in self.content if not self.owners[place]}
        self.content = {place: page for place, page in self.content.items() if self.owners[place]}

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def free_too_often(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.content)))
        with pytest.raises(ValueError, match="freed more often"):
            self.store.free(torch.tensor([place] * (self.owners[place] + 1)))

    @rule(data=st.data())
    def ask_for_what_nobody_owns(self, data: st.DataObject) -> None:
        places = torch.tensor([data.draw(st.sampled_from([-1, PAGES, 1 << 62, *sorted(self.freed)]))])
        for call in (self.store.get, self.store.retain, self.store.free):
            with pytest.raises(ValueError, match="a place without owner"):
                call(places)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "store"):
            in_use = self.store.bytes_by_tier()
            assert set(in_use) <= {"host", "disk"}
            assert sum(in_use.values()) == len(self.content) * self.store.page_bytes

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.store.close()
            with pytest.raises(ValueError, match="closed"):
                self.store.get(torch.zeros(1, dtype=torch.int64))


def check_shapes(store: PageStore) -> None:
    """What no caller may pass."""
    wide = torch.zeros(1, store.page_bytes + 1, dtype=torch.uint8)
    signed = torch.zeros(1, store.page_bytes, dtype=torch.int8)
    for payload in (wide, signed, wide[0]):
        with pytest.raises(ValueError, match="pages are"):
            store.put(payload)
    for places in (torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="places are"):
            store.get(places)
