"""The simulated device whose reads stand still at times, in cases that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from lab.sim.late.replay import READERS, ROUND_S, RULES, Device, Weather, replay
from stepwell.client.patience import STALL_S
from stepwell.protocol.messages import MAX_ALLOWED_S

WRITTEN_TO = Weather(1.0, 0.11, 0.5, share=1 / 3)
HANGS = Weather(20.0, 0.0, 0.0, per_hang=1)


def test_a_stall_holds_up_what_is_being_read_and_what_is_asked_meanwhile() -> None:
    device = Device(iter([(1.0, 1.5), (9.0, math.inf)]))
    ends = [device.read(now) for now in (0.5, 1.0 - ROUND_S / 2, 1.25, 1.5)]
    assert ends == pytest.approx([0.5 + ROUND_S, 1.5 + ROUND_S / 2, 1.5 + ROUND_S, 1.5 + ROUND_S])


def test_what_was_given_up_is_learned_from_when_it_ends() -> None:
    device = Device(iter([(9.0, math.inf)]))
    device.given_up(1.0, 1.25)
    assert device.oldest_s(1.125) == 0.125 and device.late.worth_s(0.1) == 0.1
    assert device.oldest_s(1.25) == 0.0 and device.late.worth_s(0.1) > 0.2
    assert device.healthy._count == READERS


def test_the_product_loses_less_than_by_its_healthy_reads_alone_and_waits_for_no_device_that_hangs() -> None:
    lost = {name: replay(WRITTEN_TO, rule, 300, 1) for name, rule in RULES.items()}
    assert lost["stakes"].too_soon_s < 0.5 * lost["healthy reads"].too_soon_s
    assert lost["hindsight"].in_vain_s == 0.0
    hung = {name: replay(HANGS, rule, 300, 1) for name, rule in RULES.items()}
    assert 0 < hung["stakes"].longest_s <= STALL_S + MAX_ALLOWED_S < hung["total limit"].longest_s
    assert hung["stakes"].in_vain_s < hung["300 ms"].in_vain_s
