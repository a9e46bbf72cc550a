"""Streams as the clients see them, against a well played by hand: what a worker is given, and until when it waits."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from played import PlayedWell
from wells import PATIENCE

from stepwell.client import streams as streams_module
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.patience import STALL_S, TOTAL_S, Patience
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.client.streams import Stream, StreamLimits, Streams
from stepwell.client.worker import WorkerClient
from stepwell.protocol import messages as m
from stepwell.testing.clock import SetClock

D = bytes(32)
LIMITS = StreamLimits(stall_s=1.0, total_s=4.0, allow_s=0.1)


def refs(*slots: int) -> bytes:
    return np.array([(1, slot, 5) for slot in slots], m.SLOT_REF).tobytes()


def landed(transfer: int, *slots: int, more: bool = True, reason: str = "", allow_s: float = 0.1) -> m.Landed:
    return m.Landed(transfer, refs(*slots), more, reason, allow_s)


@pytest.fixture
def clock() -> SetClock:
    return SetClock(100.0)


@pytest.fixture
def streams(clock: SetClock) -> Streams:
    made = Streams(1, clock.now)
    made.joined(7)
    return made


def slots(piece: object) -> list[int]:
    assert isinstance(piece, np.ndarray)
    return [int(row[0]["slot"]) for row in piece]


def test_what_has_landed_comes_in_its_order_and_then_why_no_more_does(streams: Streams) -> None:
    with streams.open(7, 3, LIMITS) as stream:
        assert stream.next(0.0) is None and stream.waits
        streams.landed(landed(3, 1, 2))
        streams.landed(landed(4, 8))
        streams.landed(landed(3, 5, more=False, reason="end"))
        assert not stream.waits and stream.over == "end"
        assert slots(stream.next(0.0)) == [1, 2] and slots(stream.next(0.0)) == [5]
        assert stream.next(0.0) is None and stream.over == "end"


def test_what_landed_before_the_plan_came_is_there(streams: Streams) -> None:
    streams.landed(landed(3, 1))
    streams.landed(landed(3, 2, more=False, reason="end"))
    with streams.open(7, 3, LIMITS) as stream:
        assert slots(stream.next(0.0)) == [1] and slots(stream.next(0.0)) == [2] and stream.over == "end"


def test_what_lands_for_a_stream_that_was_closed_is_dropped(streams: Streams) -> None:
    with streams.open(7, 3, LIMITS):
        pass
    streams.landed(landed(3, 1))
    assert not streams._inboxes


def test_a_stream_of_another_session_is_over(streams: Streams) -> None:
    streams.landed(landed(3, 1))
    with streams.open(6, 3, LIMITS) as stream:
        assert stream.over == "well_lost" and stream.next(0.0) is None


def test_a_session_that_is_lost_ends_its_streams_and_takes_what_they_had(streams: Streams) -> None:
    """Where it lies means nothing any more, and numbers are used again by the next session."""
    with streams.open(7, 2, LIMITS):
        pass
    with streams.open(7, 3, LIMITS) as stream:
        streams.landed(landed(3, 1))
        streams.lost()
        assert stream.over == "well_lost" and stream.next(0.0) is None
        streams.joined(8)
        streams.landed(landed(3, 9))
        assert stream.next(0.0) is None
        streams.landed(landed(2, 4))
        with streams.open(8, 2, LIMITS) as other:
            assert slots(other.next(0.0)) == [4]


def test_a_stream_without_a_sign_is_over_when_its_time_to_stall_is(streams: Streams, clock: SetClock) -> None:
    with streams.open(7, 3, LIMITS) as stream:
        clock.advance(1.05)
        assert not stream.over and stream.waits
        streams.landed(landed(3, allow_s=0.2))  # the line moves
        assert stream.next(0.0) is None
        clock.advance(1.15)
        assert not stream.over, "the well allows more now"
        clock.advance(0.06)
        assert stream.over == "too_slow" and not stream.waits
        streams.landed(landed(3, 1))
        assert not stream.over and slots(stream.next(0.0)) == [1]


def test_what_a_well_allows_is_bounded(streams: Streams, clock: SetClock) -> None:
    with streams.open(7, 3, LIMITS) as stream:
        streams.landed(landed(3, allow_s=1e9))
        clock.advance(1.0 + m.MAX_ALLOWED_S)
        assert stream.over == "too_slow"
    with streams.open(7, 4, LIMITS) as stream:
        streams.landed(landed(4, allow_s=-5.0))
        clock.advance(0.99)
        assert not stream.over


def test_a_line_that_moves_renews_its_time_to_stall(streams: Streams, clock: SetClock) -> None:
    with streams.open(7, 3, LIMITS) as stream:
        clock.advance(1.0)
        streams.moved(m.LineMoved([4], 2))
        streams.landed(landed(9, 1))
        clock.advance(1.0)
        assert not stream.over
        streams.moved(m.LineMoved([2, 3], 2))
        clock.advance(0.11)
        assert stream.over == "too_slow", "it is apart: its own blocks are being read"


def test_only_one_that_has_all_renews_the_total(streams: Streams, clock: SetClock) -> None:
    def moves(stream: Stream, *, sharing: int, times: int, whole: bool = False) -> None:
        for _ in range(times):
            assert not stream.over
            clock.advance(0.5)
            streams.landed(landed(3))
            streams.moved(m.LineMoved([], sharing, whole))

    with streams.open(7, 3, replace(LIMITS, turn_s=1.0)) as stream:
        moves(stream, sharing=9, times=6)
        assert stream.over == "too_slow"
    streams.landed(landed(4))
    streams.moved(m.LineMoved([], 1, whole=True))
    clock.advance(9.0)  # nobody comes to it
    with streams.open(7, 4, replace(LIMITS, turn_s=1.0, waited_s=2.5, sharing=1)) as stream:
        for sharing in (3, 1):
            moves(stream, sharing=sharing, times=5)
            moves(stream, sharing=sharing, times=1, whole=True)
        moves(stream, sharing=1, times=7)
        assert stream.over == "too_slow", "three times the total, less what it had waited"


def test_a_stream_that_ends_without_a_reason_ends(streams: Streams) -> None:
    with streams.open(7, 3, LIMITS) as stream:
        streams.landed(landed(3, more=False))
        assert stream.over and not stream.waits


def test_only_so_much_is_kept_of_what_nobody_opens(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "MAX_STREAMS", 4)
    for transfer in range(10):
        streams.landed(landed(transfer, 1))
        streams.close(100 + transfer)
    assert list(streams._inboxes) == [6, 7, 8, 9] and list(streams._closed) == [106, 107, 108, 109]


def test_a_thread_that_waits_is_woken_by_what_lands(streams: Streams) -> None:
    with streams.open(7, 3, LIMITS) as stream:
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(stream.next(PATIENCE)))
        thread.start()
        streams.landed(landed(3, 6))
        thread.join(PATIENCE)
        assert slots(got[0]) == [6]
        thread = threading.Thread(target=lambda: got.append(stream.next(PATIENCE)))
        thread.start()
        streams.lost()
        thread.join(PATIENCE)
        assert not thread.is_alive() and got[1] is None


# a worker -------------------------------------------------------------------------------------------------------------


def test_a_worker_says_of_a_stream_of_its_session_only() -> None:
    well = PlayedWell()
    client = WorkerClient(
        WorkerIdentity("e", 0, 1, 4096, D), lambda: well.dial, trouble=lambda error: None, threaded=False
    )
    well.receivers[-1].received(m.Welcome(7, m.PROTOCOL, "played", 0), ())
    well.receivers[-1].received(landed(3, 1), ())
    with client.stream(7, 3, LIMITS) as stream:
        assert slots(stream.next(0.0)) == [1]
        client.copied(7, 3, 1)
        well.receivers[-1].lost()
        assert stream.over == "well_lost"
        client.copied(7, 3, 1)
    assert client.membership.attempt()
    well.receivers[-1].received(m.Welcome(9, m.PROTOCOL, "played", 0), ())
    client.copied(7, 3, 2)
    assert [message for message in well.said if isinstance(message, m.BlocksCopied)] == [m.BlocksCopied(3, 1)]
    assert client.stream(7, 4, LIMITS).over == "well_lost" and not client.stream(9, 4, LIMITS).over
    client.close()


# a scheduler ----------------------------------------------------------------------------------------------------------


def scheduler(well: PlayedWell, clock: SetClock, patience: Patience | None = None) -> SchedulerClient:
    identity = EngineIdentity("e", 1, 4096, 16, D, D, "x")
    client = SchedulerClient(
        identity,
        lambda: D,
        lambda: well.dial,
        trouble=print,
        patience=patience or Patience(),
        clock=clock.now,
        threaded=False,
    )
    well.receivers[0].received(m.Ready(7), ())
    return client


def asked(client: SchedulerClient, order: int = 1) -> PrefixQuestion:
    ask = client.ask(D * 4, 0, order)
    assert ask is not None
    return ask


def found(ask: PrefixQuestion, blocks: int, known: int, ends: str, **more: object) -> m.Found:
    return m.Found(ask.ticket, 0, bytes(16 * blocks), True, "staging", known=known, ends=ends, **more)  # type: ignore[arg-type]


def test_what_is_known_may_be_offered_as_a_stream(clock: SetClock) -> None:
    well = PlayedWell()
    client = scheduler(well, clock)
    ask = asked(client)
    assert client.offer(ask, streamed=True) == 0 and not ask.offered
    well.receivers[0].received(found(ask, 1, 4, "end", allow_s=0.2), ())
    assert client.offer(ask) == 1 and client.offer(ask, streamed=True) == 4
    transfer, limits = client.stream(ask, 1, 3)
    assert well.said[-1] == m.Recall(ask.ticket, transfer, 1, 3, streamed=True)
    assert limits == StreamLimits(STALL_S, TOTAL_S, 0.2)
    client.release(ask)
    assert not any(isinstance(message, m.Release) for message in well.said), "it has ended with the stream"
    well.receivers[0].received(m.GiveWay(ask.ticket), ())
    well.receivers[0].received(found(ask, 0, 0, ""), ())
    assert ask.known == 4


def test_a_stream_may_wait_for_what_is_left_of_its_requests_time(clock: SetClock) -> None:
    well = PlayedWell()
    client = scheduler(well, clock, Patience(reading_s=0.5, block_s=1.0))
    ask = asked(client)
    client.settle(ask, 0.0)
    well.receivers[0].received(found(ask, 0, 4, "end"), ())
    clock.advance(0.75)
    client.offer(ask, streamed=True)
    assert client.stream(ask, 0, 4)[1] == StreamLimits(STALL_S + 0.5, TOTAL_S + 4, 0.0, 0, 0.75, 0.75)
    ask = asked(client)
    client.settle(ask, 0.0)
    well.receivers[0].received(found(ask, 0, 4, "end", limit_s=1.0), ())
    clock.advance(3.0)
    client._line_moved(m.LineMoved([], 3, True))
    clock.advance(0.25)
    client.offer(ask, streamed=True)
    assert client.stream(ask, 0, 4)[1] == StreamLimits(STALL_S + 0.5, 1.0, 0.0, 2, 3.25, 0.25)


def test_those_beside_a_stream_have_their_turn_when_it_has_all(clock: SetClock) -> None:
    well = PlayedWell()
    client = scheduler(well, clock)
    first, behind = asked(client, 1), asked(client, 2)
    well.receivers[0].received(found(first, 0, 4, "end"), ())
    transfer, _ = client.stream(first, 0, 4)
    assert not client.settle(behind, 0.0) and behind.sharing == 1
    well.receivers[0].received(m.Found(behind.ticket, 0, b"", True, "staging"), ())
    for _ in range(49):
        clock.advance(0.04)
        well.receivers[0].received(m.LineMoved([], 2), ())
        assert not client.settle(behind, 0.0), "the line moves"
    client.stream_ended(transfer)
    client.stream_ended(transfer)
    clock.advance(0.04)
    well.receivers[0].received(m.LineMoved([], 1, whole=True), ())
    clock.advance(0.04)
    assert not client.settle(behind, 0.0), "its turn has begun anew"
    clock.advance(0.04)
    assert client.settle(behind, 0.0), "nothing moves"


def test_a_lost_well_ends_streams_for_the_scheduler_too(clock: SetClock) -> None:
    well = PlayedWell()
    client = scheduler(well, clock)
    ask = asked(client)
    well.receivers[0].received(found(ask, 0, 4, "end"), ())
    transfer, _ = client.stream(ask, 0, 4)
    well.receivers[0].lost()
    assert not client._streams
    client.stream_ended(transfer)
