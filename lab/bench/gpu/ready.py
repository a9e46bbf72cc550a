"""Can tests and measurements on a GPU run with this Python? Standard library only, and torch where it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from stepwell.errors import ConfigError, StepwellError, Unsupported

NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "blake3": "blake3",
    "xxhash": "xxhash",
    "cryptography": "cryptography",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
}
"""Packages of measurements, by the module that they are imported as."""

MODELS = {"transformers": "transformers"}
"""Of those that run a model of transformers."""

TESTS = {"pytest": "pytest", "hypothesis": "hypothesis"}


def there(module: str) -> bool:
    return find_spec(module) is not None


def trouble(
    needed: Sequence[str] = tuple(NEEDED), *, gpu: bool = True, found: Callable[[str], bool] = there
) -> StepwellError | None:
    """What keeps them from running. `gpu`: there must be one, too."""
    names = NEEDED | MODELS | TESTS
    if missing := [names[module] for module in needed if not found(module)]:
        fix = "`pip install .` in this folder installs what stepwell needs"
        more = [name for name in missing if name in ("torch", *MODELS.values(), *TESTS.values())]
        return ConfigError(
            "SW-113",
            what=f"this Python lacks {', '.join(missing)}",
            why="tests and measurements on a GPU import stepwell, and torch for the GPU",
            fix=fix + (f", `pip install {' '.join(more)}` the rest" if more else ""),
        )
    return _no_gpu() if gpu else None


def _no_gpu() -> StepwellError | None:
    import torch

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda or torch.version.hip
    return Unsupported(
        "SW-714",
        what="there is no GPU that can be used",
        why="no GPU or driver answers torch" if built else f"torch {torch.__version__} is built for CPUs",
        fix="on a machine with one, name a Python whose torch is built for CUDA: `PYTHON=python3 make test-gpu`; "
        "`benchmarks/gpu.py --device cpu` shows on any machine that it would run",
    )
