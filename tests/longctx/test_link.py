"""Modelled links: what is computed and what a throttled store takes are the same."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from stepwell.longctx.store.host import HostPool
from stepwell.longctx.store.link import LinkQueue, ModelledLink, Throttled, virtual
from stepwell.testing.clock import SetClock

PAGE = 100


def test_transfers_queue_and_latencies_do_not() -> None:
    link = ModelledLink(bandwidth=100, latency=0.5)
    assert virtual(link, [(0, 100), (0, 100), (0.25, 50), (10, 100)]) == [1.5, 2.5, 3.0, 11.5]
    assert virtual(link, [(3, 0)]) == [3.5]
    assert virtual(link, []) == []


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (1, -1), (float("nan"), 0), (1, float("nan"))])
def test_links_that_there_are_not(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match="a link of"):
        ModelledLink(bandwidth, latency)


def test_it_says_that_it_is_modelled() -> None:
    assert str(ModelledLink(25e9, 10e-6)) == "modelled link, 25 GB/s, 10 us"


def test_a_throttled_store_ends_when_the_computation_says() -> None:
    """On a clock that only sleeping moves; some sleeps end early, as real ones may."""
    clock, naps = SetClock(), []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        clock.advance(seconds / 2 if len(naps) % 3 == 0 and seconds > 1e-6 else seconds)

    link = ModelledLink(bandwidth=1000, latency=0.25)
    store = Throttled(HostPool(PAGE, 50 * PAGE), link, clock, sleep)
    places = store.put(torch.zeros(10, PAGE, dtype=torch.uint8))
    requests, ends = [], []
    for count in (1, 10, 3, 0):
        requests.append((clock.now(), count * PAGE))
        store.get(places[:count])
        ends.append(clock.now())
        clock.advance(0.1)
    assert ends == pytest.approx(virtual(link, requests), abs=1e-5)


def test_threads_share_a_link() -> None:
    """In real time: together they are not done before the computation says."""
    link, began = ModelledLink(bandwidth=PAGE * 1000, latency=0.001), time.monotonic()
    queue = LinkQueue(link)
    stores = [Throttled(HostPool(PAGE, 10 * PAGE), queue) for _ in range(2)]
    all_places = [store.put(torch.zeros(10, PAGE, dtype=torch.uint8)) for store in stores]
    readers = [
        threading.Thread(target=store.get, args=(places,)) for store, places in zip(stores, all_places, strict=True)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert time.monotonic() - began >= virtual(link, [(0, 10 * PAGE), (0, 10 * PAGE)])[-1]
