"""A worker's client against a hand-played well: what it may copy, for which session, and until when."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from played import PlayedWell
from wells import PATIENCE, eventually

from stepwell.block.layout import SlabLayout
from stepwell.client.worker import Identity, WorkerClient
from stepwell.errors import IntegrityError, StepwellError
from stepwell.io.memory import Shared
from stepwell.protocol import messages as m

LAYOUT = SlabLayout(4096, 2)
GENERATION = 5


class WithSlab(PlayedWell):
    """One slab, with slots of one generation."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Shared(LAYOUT.nbytes)
        self.slab.bytes[: 8 * LAYOUT.slots].view(np.uint64)[:] = GENERATION

    def welcome(self, session: int) -> None:
        self.receivers[-1].received(m.Welcome(session, m.PROTOCOL, "played", 0), ())
        shared = m.SlabShared(1, LAYOUT.nbytes, LAYOUT.offset, LAYOUT.stride, LAYOUT.slots)
        self.receivers[-1].received(shared, (os.dup(self.slab.fd),))

    def told(self, kind: type[m.Message]) -> Sequence[m.Message]:
        return [message for message in self.said if isinstance(message, kind)]


@pytest.fixture
def well() -> Iterator[WithSlab]:
    played = WithSlab()
    yield played
    played.slab.close()


def worker(well: WithSlab) -> WorkerClient:
    troubles: list[StepwellError] = []
    client = WorkerClient(
        Identity("e", 0, 1, 4096, bytes(32)), lambda: well.dial, trouble=troubles.append, threaded=False
    )
    well.welcome(7)
    assert well.told(m.Mapped) == [m.Mapped(1)]
    assert not troubles
    return client


def test_a_slot_is_that_of_its_session_and_generation_or_none(well: WithSlab) -> None:
    client = worker(well)
    assert len(client.slot(7, 1, 0, GENERATION).bytes) == 4096
    for session, slab, generation in ((8, 1, GENERATION), (7, 2, GENERATION), (7, 1, GENERATION - 1), (7, 1, 0)):
        with pytest.raises(IntegrityError):
            client.slot(session, slab, 0, generation)
    client.close()


def test_a_copy_that_outlives_its_session_keeps_its_slab_and_is_not_believed(well: WithSlab) -> None:
    """Nor is the session acknowledged before it has ended: the well would use its slots again."""
    client = worker(well)
    with client.copying():
        slot = client.slot(7, 1, 0, GENERATION)
        losing = threading.Thread(target=well.receivers[-1].lost)
        losing.start()
        eventually(lambda: client.membership.outbox is None and client._session == 0)
        losing.join(0.05)
        assert losing.is_alive() and client.mapped == 1
        assert not slot.bytes.any(), "it can still be read"
        with pytest.raises(IntegrityError):
            client.verify(7, 1, 0, GENERATION)
        assert client._hello() is None
        del slot
    losing.join(PATIENCE)
    assert not losing.is_alive() and client.mapped == 0
    hello = client._hello()
    assert hello is not None and hello.acknowledges == [7]
    client.close()


def test_what_was_of_a_lost_session_is_not_said_to_the_next(well: WithSlab) -> None:
    client = worker(well)
    well.receivers[-1].lost()
    client.filled(7, [1], [])
    assert client.membership.attempt()
    well.welcome(9)
    client.filled(7, [1], [])
    client.recalled(7, [2])
    assert not well.told(m.Filled) and not well.told(m.Recalled)
    client.filled(9, [3], [4])
    assert well.told(m.Filled) == [m.Filled([3], [4])]
    client.close()
