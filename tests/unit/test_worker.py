"""A worker's client against a hand-played well: what it may copy, for which session, and until when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from played import PlayedWell
from wells import PATIENCE, eventually

from stepwell.block.layout import SlabLayout
from stepwell.client.identity import WorkerIdentity
from stepwell.client.slabs import Prepare
from stepwell.client.streams import StreamLimits
from stepwell.client.worker import WorkerClient
from stepwell.errors import IntegrityError, StepwellError
from stepwell.io.memory import Bytes, SharedMemory
from stepwell.protocol import messages as m

LAYOUT = SlabLayout(4096, 2)
GENERATION = 5


class WithSlab(PlayedWell):
    """One slab, with slots of one generation."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = SharedMemory(LAYOUT.nbytes)
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


def worker(well: WithSlab, prepare: Prepare | None = None, codes: Sequence[str] = ()) -> WorkerClient:
    """Live, with its slab. `codes`: the only troubles that it may have."""

    def trouble(error: StepwellError) -> None:
        assert error.code in codes

    client = WorkerClient(
        WorkerIdentity("e", 0, 1, 4096, bytes(32)), lambda: well.dial, trouble=trouble, prepare=prepare, threaded=False
    )
    well.welcome(7)
    assert well.told(m.Mapped) == [m.Mapped(1)]
    return client


def test_a_slot_is_that_of_its_session_and_generation_or_none(well: WithSlab) -> None:
    client = worker(well)
    hold = client.hold()
    assert len(hold.slot(7, 1, 0, GENERATION).bytes) == 4096
    for session, slab, generation in ((8, 1, GENERATION), (7, 2, GENERATION), (7, 1, GENERATION - 1), (7, 1, 0)):
        with pytest.raises(IntegrityError):
            hold.slot(session, slab, 0, generation)
        with pytest.raises(IntegrityError):
            client.verify(session, slab, 0, generation)
    hold.close()
    client.close()


def test_a_copy_that_outlives_its_session_keeps_its_slab_and_is_not_believed(well: WithSlab) -> None:
    """Nor is the session acknowledged before it has ended: the well would use its slots again."""
    client = worker(well)
    with client.copying() as hold:
        slot = hold.slot(7, 1, 0, GENERATION)
        well.receivers[-1].lost()
        assert client.mapped == 1
        assert not slot.bytes.any(), "it can still be read"
        with pytest.raises(IntegrityError):
            hold.slot(7, 1, 0, GENERATION)
        with pytest.raises(IntegrityError):
            client.verify(7, 1, 0, GENERATION)
        assert client._hello() is None
        del slot
    assert client.mapped == 0
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


def test_a_session_of_which_a_driver_keeps_a_slab_is_never_acknowledged(well: WithSlab) -> None:
    """The worker joins again all the same; what it cannot let go of stays the well's to count until it exits."""

    def prepare(whole: Bytes) -> Callable[[], None]:
        def undo() -> None:
            raise RuntimeError("the driver is gone")

        return undo

    client = worker(well, prepare, codes=["SW-206"])
    well.receivers[-1].lost()
    hello = client._hello()
    assert hello is not None and hello.acknowledges == [] and client.leaked == 1
    assert client.membership.attempt()
    client.close()


def test_a_slab_of_a_lost_session_is_undone_before_the_next_hello(well: WithSlab) -> None:
    """Also one that was still being prepared when the session was lost."""
    may_go_on, working = threading.Event(), threading.Event()
    undone: list[int] = []

    def prepare(whole: Bytes) -> Callable[[], None]:
        working.set()
        assert may_go_on.wait(PATIENCE)
        return lambda: undone.append(threading.get_ident())

    client = WorkerClient(
        WorkerIdentity("e", 0, 1, 4096, bytes(32)), lambda: well.dial, trouble=lambda error: None, prepare=prepare
    )
    eventually(lambda: bool(well.receivers))
    well.welcome(7)
    assert working.wait(PATIENCE)
    well.receivers[-1].lost()
    assert client._hello() is None
    may_go_on.set()
    eventually(lambda: len(well.told(m.Hello)) == 2)
    assert len(undone) == 1 and undone[0] != threading.get_ident()
    assert well.told(m.Hello)[-1].acknowledges == [7] and not well.told(m.Mapped)  # type: ignore[attr-defined]
    client.close()


def test_a_stream_that_ends_has_a_reason_and_whoever_copies_it_is_told(well: WithSlab) -> None:
    client, told = worker(well), []
    client.stirred = lambda: told.append(1)
    with client.stream(7, 3, StreamLimits(60.0, 60.0)) as stream:
        assert stream.waits
        well.receivers[-1].received(m.Landed(3, b"", False), ())
        assert stream.over and not stream.waits and len(told) == 1
    with client.stream(7, 4, StreamLimits(60.0, 60.0)) as stream:
        well.receivers[-1].lost()
        assert stream.over == "well_lost" and len(told) == 2
    client.close()


def test_the_mapping_thread_ends_when_the_last_slab_is_gone(well: WithSlab) -> None:
    before = set(threading.enumerate())
    client = WorkerClient(WorkerIdentity("e", 0, 1, 4096, bytes(32)), lambda: well.dial, trouble=lambda error: None)
    (thread,) = {t for t in threading.enumerate() if t.name == "stepwell-map"} - before
    eventually(lambda: bool(well.receivers))
    well.welcome(7)
    eventually(lambda: client.mapped == 1)
    with client.copying() as hold:
        hold.slot(7, 1, 0, GENERATION)
        client.close()
        assert thread.is_alive() and client.mapped == 1
    thread.join(PATIENCE)
    assert not thread.is_alive() and client.mapped == 0
