"""Prefill costs of hardware without measurements: presets from descriptions.

    FLOP of n tokens behind c others = 2 P n + 4 L d (n c + n^2 / 2)

P parameters are multiplied and added once for each token (J. Kaplan et al., "Scaling Laws for Neural Language Models",
2020, section 2.1); in each of L layers a token's query meets every key, and its weights every value, of width d each: 2
x 2 d for each pair. Seconds are this divided by the hardware's FLOP per second: its peak times the share of it that
prefill reaches, 50 % unless given. Dense models with full attention only.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from stepwell.errors import ConfigError
from stepwell.policies.costs.prefill import PrefillCost

REACHED = 0.5
"""Share of the peak that prefill of long prompts reaches on well-tuned engines."""


@dataclass(frozen=True, slots=True)
class Model:
    """`parameters`; `layers`; `width`: query heads times their size. `kv_token_bytes`: KV of one token, all layers."""

    parameters: float
    layers: int
    width: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """`flops`: peak of dense 16-bit matrix products, all devices together; `reached`: the share that prefill gets."""

    flops: float
    reached: float = REACHED


MODELS = {
    "llama-3.1-8b": Model(8.03e9, 32, 4096, 131_072),
    "llama-3.1-70b": Model(70.6e9, 80, 8192, 327_680),
}
"""Models by their published configurations; KV in bfloat16."""

MACHINES = {
    "h100": Machine(989e12),
    "4xh100": Machine(4 * 989e12),
}
"""NVIDIA H100 SXM data sheet: 989 TFLOP/s of dense bfloat16. Four split a model with tensor parallelism; what that
loses is in the share reached."""


def prefill_cost(model: Model, machine: Machine) -> PrefillCost:
    """Raises ConfigError SW-115 for what no machine or model can be."""
    _possible("parameters", model.parameters)
    _possible("layers", model.layers)
    _possible("width", model.width)
    _possible("flops", machine.flops)
    _possible("reached", machine.reached, most=1.0)
    speed = machine.flops * machine.reached
    return PrefillCost(0.0, 2 * model.parameters / speed, 4 * model.layers * model.width / speed)


def preset(name: str) -> PrefillCost:
    """The cost of "MODEL@MACHINE". Raises ConfigError SW-115."""
    model, _, machine = name.partition("@")
    if model in MODELS and machine in MACHINES:
        return prefill_cost(MODELS[model], MACHINES[machine])
    names = presets()
    near = difflib.get_close_matches(name, names, 1)
    raise ConfigError(
        "SW-115",
        what=f"there is no preset {name[:80]!r}",
        why="costs are known for these: " + ", ".join(names),
        fix=f"did you mean {near[0]}?" if near else "name one of them as MODEL@MACHINE",
    )


def presets() -> list[str]:
    return [f"{model}@{machine}" for model in MODELS for machine in MACHINES]


def _possible(name: str, value: float, most: float = math.inf) -> None:
    if not (0 < value <= most and math.isfinite(value)):
        bound = f" and at most {most:g}" if math.isfinite(most) else ""
        raise ConfigError(
            "SW-115",
            what=f"{name} = {value!r} describes no hardware or model",
            why=f"it must be a number over 0{bound}",
            fix=f"correct {name}",
        )
