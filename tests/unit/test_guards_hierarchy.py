"""Who is served first when something becomes free that several requests wait for."""

from __future__ import annotations

from itertools import permutations

import pytest
from deep import HEALTHY, HUNG, DeepRig, at, chain, fill, told, written

from stepwell.protocol.messages import Found
from stepwell.testing.arena_kit import SLOT

PINNED = 12  # blocks that requests that wait may have pinned together, of an arena of three slabs


def in_line(orders: tuple[int, ...]) -> list[int]:
    """Those that were preempted first, else as they came."""
    return sorted(orders, key=lambda order: min(order, 0))


@pytest.mark.parametrize("orders", [*permutations((-1, 20, 30))])
def test_what_becomes_free_goes_to_the_first_request_in_line(orders: tuple[int, ...]) -> None:
    """Whichever of them looked last: a later one would keep the first waiting for as long as it waits."""
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(PINNED + 3)
    fill(engine, digests)
    rig.settle()
    held = [engine.ask(at(digests, n), order=n) for n in range(PINNED)]
    rig.settle()
    assert rig.stat("pinned_bytes") == PINNED * SLOT
    asked = {order: engine.ask(at(digests, PINNED + n), order=order) for n, order in enumerate(orders)}
    rig.settle()
    assert [engine.answer(ticket).reason for ticket in asked.values()] == ["pins"] * 3
    served: list[int] = []
    for ticket in held[:3]:
        engine.release(ticket)
        rig.settle()
        served += [order for order in asked if len(engine.answer(asked[order]).refs) and order not in served]
    assert served == in_line(orders)


@pytest.mark.parametrize("orders", [(10, 20), (20, 10), (10, -1)])
def test_of_two_that_wait_for_one_block_the_earlier_is_told_first_when_it_lands(orders: tuple[int, int]) -> None:
    rig = written(3, PINNED + 2)
    engine, digests = rig.join(), chain(PINNED + 2)
    rig.faulty.faults = HUNG
    shared = at(digests, 0)
    asked = {order: engine.ask(shared + at(digests, n + 1), order=order) for n, order in enumerate(orders)}
    rig.turns()
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.executor.drain()
    first = asked[in_line(orders)[0]]
    engine.answer(first)  # what was said so far
    rig.turns()
    said = [found.ticket for found in engine.scheduler.inbox if isinstance(found, Found)]
    assert said[0] == first
    rig.settle()
    for n, order in enumerate(orders):
        assert told(engine, engine.answer(asked[order]).refs) == [100, 101 + n]
