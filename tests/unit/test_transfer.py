from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.policies.costs.transfer import SAMPLES, TierSpeed, TransferFit
from stepwell.policies.probe import LONGEST_S, PAUSE_S, SHARE, Probing

MIB = 1 << 20


def learn(
    fit: TransferFit, seed: int, bandwidth: float, *, batches: int = 40, latency_s: float = 0.0, spoilt: float = 0.0
) -> TransferFit:
    random_ = random.Random(seed)
    for _ in range(batches):
        nbytes, side_by_side = random_.choice([1, 2, 4, 8]) * MIB, random_.choice([1, 2, 4])
        seconds = (latency_s + nbytes * side_by_side / bandwidth) * math.exp(random_.gauss(0, 0.1))
        fit.observe(nbytes, seconds * (random_.uniform(2, 8) if random_.random() < spoilt else 1), side_by_side)
    return fit


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("seed", range(10))
def test_the_bandwidth_is_found_in_noise(seed: int, bandwidth: float) -> None:
    speed = learn(TransferFit(16 * MIB), seed, bandwidth, spoilt=0.1).speed
    assert speed is not None
    assert speed.seconds(256 * MIB) == pytest.approx(256 * MIB / bandwidth, rel=0.4)


def test_latency_is_told_from_bandwidth_and_comes_once_for_what_is_asked_at_a_time() -> None:
    speed = learn(TransferFit(16 * MIB), 1, 1e8, latency_s=0.1).speed
    assert speed is not None
    assert speed.latency_s == pytest.approx(0.1, rel=0.2)
    assert speed.seconds(160 * MIB) == pytest.approx(11 * 0.1 + 160 * MIB / 1e8, rel=0.2)


def test_what_was_asked_for_before_comes_first() -> None:
    speed = TierSpeed(0.5, 1e-6)
    assert speed.seconds(1_000_000, 2_000_000) == pytest.approx(3.5)
    assert speed.seconds(0, 2_000_000) == 0


def test_a_change_of_speed_is_followed() -> None:
    fit = learn(TransferFit(16 * MIB), 1, 1e9)
    learn(fit, 2, 1e7, batches=16)
    assert fit.speed is not None
    assert fit.speed.seconds(MIB * 100) == pytest.approx(MIB * 100 / 1e7, rel=0.3)


@given(
    st.integers(0, 1 << 50),
    st.lists(st.tuples(st.integers(1, 1 << 50), st.floats(1e-9, 1e6), st.floats(1, 1e6)), min_size=2, max_size=20),
)
def test_whatever_was_seen_more_bytes_never_take_less(in_flight: int, batches: list[tuple[int, float, float]]) -> None:
    """`in_flight` is 0 where there is no tier below."""
    fit = TransferFit(in_flight)
    for batch in batches:
        fit.observe(*batch)
    speed = fit.speed
    assert speed is not None
    assert 0 < speed.seconds(1 << 40) < math.inf
    assert speed.seconds(1 << 20) <= speed.seconds(1 << 21) <= speed.seconds(1 << 21, 1)
    assert 0 <= speed.doubt <= 1


def test_two_probes_tell_that_a_tier_has_become_faster() -> None:
    fit = TransferFit(16 * MIB)
    for n in range(60):
        fit.observe(2 * MIB, 2.0, at=n / 10)
    for n in range(4):
        fit.observe(MIB, 0.01, at=6 + PAUSE_S * (1 + n // 2))
    assert fit.speed is not None
    assert fit.speed.seconds(100 * MIB) == pytest.approx(1.0, rel=0.3)


def test_a_noisy_tier_is_doubted_more() -> None:
    def doubt(noise: float) -> float:
        fit, random_ = TransferFit(16 * MIB), random.Random(1)
        for _ in range(30):
            fit.observe(MIB, math.exp(random_.gauss(0, noise)))
        assert fit.speed is not None
        return fit.speed.doubt

    assert doubt(0.01) < doubt(0.2) < doubt(1.0) <= 1


@pytest.mark.parametrize(
    "batch", [(0, 1.0, 1.0), (-1, 1.0, 1.0), (1, 0.0, 1.0), (1, math.nan, 1.0), (1, math.inf, 1.0), (1, 1.0, 0.0)]
)
def test_what_cannot_be_is_left_out(batch: tuple[int, float, float]) -> None:
    fit = TransferFit(MIB)
    for _ in range(8):
        fit.observe(*batch)
    assert fit.speed is None


def test_one_batch_says_nothing_and_many_take_no_more_room() -> None:
    fit = TransferFit(MIB)
    fit.observe(MIB, 1.0)
    assert fit.speed is None
    for _ in range(1000):
        fit.observe(MIB, 1.0)
    assert len(fit._samples) == SAMPLES


@given(st.lists(st.tuples(st.floats(0, 2 * LONGEST_S), st.floats(1e-6, SHARE * LONGEST_S)), min_size=1, max_size=50))
def test_probes_take_a_hundredth_of_the_tiers_time(moments: list[tuple[float, float]]) -> None:
    probing, spent, first = Probing(), 0.0, None
    now = ended = 0.0
    for gap, seconds in moments:
        now += gap
        if not probing.begin(now):
            continue
        first = now if first is None else first
        assert not spent or now - ended >= PAUSE_S
        assert spent <= SHARE * (now - first) + 1e-9
        assert not probing.begin(now + LONGEST_S / 2)  # one at a time
        now += seconds
        ended = now
        spent += seconds
        probing.read(now, seconds)


@pytest.mark.parametrize("hung_s", [1.0, 60.0, 6000.0])
def test_a_tier_that_hung_during_a_probe_is_probed_again_within_a_minute(hung_s: float) -> None:
    probing = Probing()
    assert probing.begin(0.0)
    probing.read(hung_s, hung_s)
    assert not probing.begin(hung_s + LONGEST_S / 2)
    assert probing.begin(hung_s + LONGEST_S)


def test_a_tier_that_is_read_anyway_is_not_probed() -> None:
    probing = Probing()
    probing.read(100.0, 0.1)
    assert not probing.begin(100.0 + PAUSE_S / 2)
    assert probing.begin(100.0 + PAUSE_S)


def test_a_probe_that_came_to_nothing_is_not_the_last() -> None:
    probing = Probing()
    assert probing.begin(0.0)
    assert probing.begin(LONGEST_S)
