"""The engine side's clients against a hand-played well: what must hold at moments that a real one rarely gives."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from stepwell.client import membership as joining
from stepwell.client.membership import Membership
from stepwell.client.scheduler import Ask, Identity, SchedulerClient
from stepwell.errors import StepwellError, Unsupported, as_error
from stepwell.io.memory import Shared
from stepwell.protocol import messages as m
from stepwell.protocol.link import Link, Receiver

D = bytes(32)


class PlayedWell:
    """Takes every hello and keeps what is posted; the test answers."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []
        self.receivers: list[Receiver] = []
        self.closed = 0

    def dial(self, hello: m.Hello, receiver: Receiver) -> Link:
        self.said.append(hello)
        self.receivers.append(receiver)
        return self

    def post(self, message: m.Message) -> None:
        self.said.append(message)

    def close(self) -> None:
        self.closed += 1


def scheduler(well: PlayedWell, told: list[StepwellError] | None = None) -> SchedulerClient:
    errors = told if told is not None else []
    client = SchedulerClient(
        Identity("e", 1, 4096, 16, D, D, "x"), lambda: D, lambda: well.dial, trouble=errors.append, threaded=False
    )
    well.receivers[0].received(m.Ready(7), ())
    return client


def found(ask: Ask, blocks: int, *, more: bool, reason: str = "") -> m.Found:
    return m.Found(ask.ticket, ask.blocks, bytes(blocks * m.SLOT_REF.itemsize), more, reason)


def released(well: PlayedWell) -> int:
    return sum(isinstance(message, m.Release) for message in well.said)


def test_an_ask_that_is_finished_is_released_when_its_answer_has_come() -> None:
    """Not before: a release that overtakes the answer would leave the blocks unused in the well's eyes."""
    well = PlayedWell()
    client = scheduler(well)
    answer = well.receivers[0].received
    ask = client.ask(D + D + D, 0, 1)
    assert ask is not None
    client.finish(ask)
    answer(found(ask, 2, more=True), ())
    assert not released(well)
    answer(found(ask, 1, more=False, reason="end"), ())
    assert (released(well), ask.blocks, ask.final) == (1, 3, True)
    client.release(ask)
    assert released(well) == 1


@pytest.mark.parametrize(("more", "reason"), [(False, "end"), (True, "pins")])
@pytest.mark.parametrize("finished_first", [False, True])
def test_a_finished_ask_neither_waits_in_the_well_nor_outlives_its_answer(
    more: bool, reason: str, finished_first: bool
) -> None:
    well = PlayedWell()
    client = scheduler(well)
    ask = client.ask(D + D + D, 0, 1)
    assert ask is not None
    steps = [
        lambda: client.finish(ask),
        lambda: well.receivers[0].received(found(ask, 2, more=more, reason=reason), ()),
    ]
    for step in steps if finished_first else reversed(steps):
        step()
    assert (released(well), ask.blocks, ask.final) == (1, 2, True)


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_spill_that_nobody_wants_is_given_back_whenever_its_grant_comes(granted_first: bool) -> None:
    well = PlayedWell()
    client = scheduler(well)
    spill = client.reserve(b"", D + D + D, 0)
    assert spill is not None
    grant = m.Granted(spill.number, [11, 0, 13], bytes(2 * m.SLOT_REF.itemsize))
    steps = [lambda: well.receivers[0].received(grant, ()), lambda: client.abandon(spill, 0)]
    for step in steps if granted_first else reversed(steps):
        step()
    assert [a.leases for a in well.said if isinstance(a, m.Abandon)] == [[11, 13]]


def test_only_what_is_left_of_a_spill_is_given_back() -> None:
    well = PlayedWell()
    client = scheduler(well)
    spill = client.reserve(b"", D + D + D, 0)
    assert spill is not None
    well.receivers[0].received(m.Granted(spill.number, [11, 12, 13], bytes(3 * m.SLOT_REF.itemsize)), ())
    client.abandon(spill, 2)
    assert [a.leases for a in well.said if isinstance(a, m.Abandon)] == [[13]]


def test_counts_reach_the_well_when_the_engine_is_idle() -> None:
    well = PlayedWell()
    client = scheduler(well)
    client.count("missed_too_slow")
    client.report(idle=True)
    assert [r.counts for r in well.said if isinstance(r, m.Report)] == [{"missed_too_slow": 1}]


class Refusing(PlayedWell):
    """Refuses every hello at once."""

    code = "SW-401"

    def dial(self, hello: m.Hello, receiver: Receiver) -> Link:
        super().dial(hello, receiver)
        receiver.received(m.Refused(self.code, "w", "y", "f"), ())
        receiver.lost()
        return self


def test_a_refused_member_tries_ever_more_rarely_and_tells_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[StepwellError] = []
    waits: list[float] = []
    well = Refusing()

    class Quiet:
        def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
            assert isinstance(message, m.Refused)
            member.trouble(joining_error)

        def lost(self) -> None: ...

    joining_error = as_error("SW-801", "w", "y", "f")
    member = Membership(lambda: m.Hello(1, "worker"), lambda: well.dial, Quiet(), told.append)

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds or 0.0)
        if len(waits) == 8:
            member.close()
        return False

    monkeypatch.setattr(member._closed, "wait", wait)
    member._run()
    assert len(told) == 1
    assert waits == sorted(waits) and waits[-1] == joining.LONGEST_WAIT, waits

    waits.clear()
    told.clear()
    joining_error = as_error("SW-401", "w", "y", "f")
    member = Membership(lambda: m.Hello(1, "worker"), lambda: well.dial, Quiet(), told.append)
    monkeypatch.setattr(member._closed, "wait", wait)
    member._run()
    assert waits == [joining.PERSON_WAIT] * 8, "a person must act first"


def test_without_memfd_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(Unsupported) as raised:
        Shared(4096)
    assert raised.value.code == "SW-702"
