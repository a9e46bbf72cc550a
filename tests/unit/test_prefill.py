from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.policies.costs.hardware import Machine, Model, prefill_cost, preset
from stepwell.policies.costs.prefill import MAX_KINDS, MIN_SAMPLES, SAMPLES, PrefillCost, PrefillFit, pairs

TRUE = PrefillCost(0.02, 1e-3, 4e-8, 2048)
SHORT, LONG = (500, 0), (16_000, 0)


def learn(
    fit: PrefillFit, seed: int, *, steps: int = 100, noise: float = 0.1, spoilt: float = 0.0, speed: float = 1.0
) -> PrefillFit:
    """Steps of a noisy machine, some of them spoilt by somebody else."""
    random_ = random.Random(seed)
    for _ in range(steps):
        tokens, context = random_.choice([2048, 2048, 600, 300, 128]), random_.choice([0, 0, 2048, 4096])
        seconds = speed * TRUE.seconds(tokens, context) * math.exp(random_.gauss(0, noise))
        if random_.random() < spoilt:
            seconds *= random_.uniform(2, 8)
        fit.observe(tokens, pairs(tokens, context), seconds)
    return fit


def off(fit: PrefillFit, new: int, context: int) -> float:
    assert fit.cost is not None
    return fit.cost.seconds(new, context) / TRUE.seconds(new, context) - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_is_found_in_noise_and_among_spoilt_steps(seed: int) -> None:
    fit = learn(PrefillFit(), seed, spoilt=0.15)
    assert abs(off(fit, *SHORT)) < 0.2
    assert abs(off(fit, *LONG)) < 0.35


def test_spoilt_steps_count_for_little() -> None:
    """Without the reweighting they alone would move the estimate by half."""
    found = sorted(off(learn(PrefillFit(), seed, spoilt=0.15), *SHORT) for seed in range(15))
    assert found[7] < 0.1


def test_exact_steps_are_met_exactly() -> None:
    fit = learn(PrefillFit(), 1, noise=0)
    for new, context in (SHORT, LONG, (4000, 8000)):
        assert abs(off(fit, new, context)) < 0.01
        assert fit.doubt(new, context) < 0.05


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 26), st.integers(0, 1 << 25), st.floats(1e-9, 1e6)), min_size=1, max_size=40
    ),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 20),
)
def test_whatever_was_seen_more_tokens_never_take_less(
    steps: list[tuple[int, int, float]], new: int, context: int
) -> None:
    fit = PrefillFit()
    for tokens, before, seconds in steps:
        fit.observe(tokens, pairs(tokens, before), seconds)
    cost = fit.cost
    assert (cost is None) == (len(steps) < MIN_SAMPLES)
    if cost is None:
        return
    assert 0 < cost.seconds(new, context) < math.inf
    assert cost.seconds(new, context) <= cost.seconds(new + 1, context)
    assert cost.seconds(new, context) <= cost.seconds(new, context + 1)
    assert 0 < fit.doubt(new, context) <= 1


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 100_000))
def test_attention_of_a_prompt_is_that_of_its_parts(first: int, second: int, context: int) -> None:
    assert pairs(first + second, context) == pairs(first, context) + pairs(second, context + first)


def test_a_machine_that_slows_down_is_followed() -> None:
    fit = learn(PrefillFit(), 1)
    learn(fit, 2, steps=150, speed=2)
    assert off(fit, *SHORT) == pytest.approx(1, abs=0.2)


def test_long_contexts_stay_known_while_short_prompts_come() -> None:
    fit = learn(PrefillFit(), 1, noise=0.02)
    for _ in range(500):
        fit.observe(128, pairs(128, 0), TRUE.seconds(128))
    assert abs(off(fit, 2048, 4096)) < 0.1


def test_what_lies_beyond_everything_seen_is_doubted() -> None:
    fit = PrefillFit()
    for n in range(40):
        fit.observe(200 + n % 8, pairs(200 + n % 8, 0), 0.2 * (1 + n % 3 / 20))
    assert fit.doubt(100_000) > 5 * fit.doubt(200)


def test_memory_is_bounded() -> None:
    fit = PrefillFit()
    for n in range(4000):
        tokens = 1 << n % 20
        fit.observe(tokens, pairs(tokens, 1 << n // 20 % 25), 1.0)
    assert sum(map(len, fit._kinds.values())) <= MAX_KINDS * SAMPLES


@pytest.mark.parametrize(
    "step",
    [(0, 1.0, 1.0), (-1, 1.0, 1.0), (1, 0.0, 1.0), (1, math.nan, 1.0), (1, 1.0, 0.0), (1, 1.0, math.nan),
     (1, 1.0, math.inf), (1, math.inf, 1.0), (1 << 60, 1.0, 1.0)],
)  # fmt: skip
def test_what_cannot_be_is_left_out(step: tuple[int, float, float]) -> None:
    fit = PrefillFit()
    for _ in range(2 * MIN_SAMPLES):
        fit.observe(*step)
    assert fit.cost is None


def test_a_calibration_is_believed_until_there_are_steps() -> None:
    fit = PrefillFit(TRUE)
    assert fit.cost == TRUE
    assert fit.doubt(*LONG) == 0.5
    fit.observe(600, pairs(600, 0), 3 * TRUE.seconds(600))  # now the machine is slower
    assert abs(off(fit, *SHORT) - 2) < 0.1
    assert abs(off(fit, 600, 20_000) - 2) < 0.1  # its proportions are those of the calibration


def test_a_calibration_gives_way_to_steps() -> None:
    fit = learn(PrefillFit(PrefillCost(5.0, 1e-6, 1e-12)), 1)
    assert abs(off(fit, *SHORT)) < 0.2


@pytest.mark.parametrize("part", [-1.0, math.nan, math.inf])
def test_an_impossible_calibration_is_none(part: float) -> None:
    assert PrefillFit(PrefillCost(0.0, part, 0.0)).cost is None
    assert PrefillFit(PrefillCost(0.0, 0.0, 0.0)).cost is None


def test_a_prompt_of_many_steps_pays_for_each() -> None:
    assert TRUE.seconds(4096) == pytest.approx(2 * 0.02 + 4.096 + 4e-8 * 4096**2 / 2)
    assert TRUE.seconds(10) == pytest.approx(0.02 + 0.01, rel=1e-3)
    assert TRUE.seconds(0) == 0


def test_presets_agree_with_what_others_measured() -> None:
    assert preset("llama-3.1-8b@h100").seconds(20_000) == pytest.approx(0.9, abs=0.05)
    assert preset("llama-3.1-70b@4xh100").seconds(20_000) == pytest.approx(1.5, abs=0.2)


def test_an_unknown_preset_is_told_with_its_neighbour() -> None:
    with pytest.raises(ConfigError) as raised:
        preset("llama-3.1-8b@h1000")
    assert raised.value.code == "SW-115"
    assert "llama-3.1-8b@h100?" in raised.value.fix


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("field", ["parameters", "layers", "width", "flops", "reached"])
def test_impossible_hardware_is_a_clear_error(field: str, bad: float) -> None:
    given_ = {"parameters": 8e9, "layers": 32, "width": 4096, "flops": 1e15, "reached": 0.5, field: bad}
    model = Model(given_["parameters"], given_["layers"], given_["width"], 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        prefill_cost(model, Machine(given_["flops"], given_["reached"]))
    assert raised.value.code == "SW-115"
    assert field in raised.value.what
