"""Finds the files that hold the weights that this vLLM runs, as input to the fingerprint.

Errs towards more files: one too many costs reading time and perhaps a needless miss, one too few could let two models
share KV. Which of them a loader reads follows from their names, its index files and its settings: the fingerprint has
the former, the model's facts the latter, so that other files read are another namespace. Does not read the files
(client/fingerprint.py does). Called once by the connector's scheduler half, when the workers have loaded the model, so
that files fetched from a hub are there.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.engines.common.weights import NoWeightFiles, WeightFiles
from stepwell.engines.vllm.identity.drafts import drafter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Loaders that read files lying in the model's folder. All others (dummy, streamed, mapped from a daemon, npcache with
# its converted copy, plugins) get their weights where we cannot look.
_FILE_LOADERS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "safetensors",
        "sharded_state",
    }
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
# Small files that decide how weights or pictures are read: shard indexes, quantisation recipes, image processing.
_BESIDE = ("*.index.json", "*quant*config*.json", "*processor_config.json", "params.json")
_NOT_WEIGHTS = ("*training_args.bin", "*optimizer.bin", "*optimizer.pt", "*scheduler.pt", "*scaler.pt")  # vLLM's list
_NOT_LOOKED_INTO = ("checkpoint-*", "runs", "global_step*")
_DEPTH = 3


def weight_files(vllm_config: VllmConfig) -> WeightFiles | NoWeightFiles:
    """The local files that the configured loaders take the weights from, of the model and of a drafter that keeps KV of
    its own, or why there are none to look at.

    A hub id is looked up in the local hub cache only, never on the network. Raises nothing on purpose; a folder that
    cannot be listed counts as empty.
    """
    files = _weight_files(vllm_config.model_config, vllm_config.load_config)
    if (drafts := drafter(vllm_config)) is None or isinstance(files, NoWeightFiles):
        return files
    load = getattr(drafts, "draft_load_config", None) or vllm_config.load_config
    more = _weight_files(drafts.draft_model_config, load)
    if isinstance(more, NoWeightFiles):
        return NoWeightFiles(f"of the drafter: {more.reason}")
    return WeightFiles(files.paths, more.paths if more.paths != files.paths else ())


def _weight_files(model: Any, load: Any) -> WeightFiles | NoWeightFiles:
    load_format = str(load.load_format)
    if load_format not in _FILE_LOADERS:
        return NoWeightFiles(f"load format {load_format!r} does not read them from the model's folder")
    if not _own_loader(load):
        return NoWeightFiles(f"the loader of load format {load_format!r} is not one of vLLM's own")
    pattern = _extra(load).get("pattern")
    if isinstance(pattern, str) and (os.sep in pattern or not pattern.endswith(_WEIGHTS)):
        return NoWeightFiles(f"the loader's file name pattern {pattern!r} leads elsewhere or has no known ending")
    source = getattr(model, "model_weights", "") or model.model
    if "://" in source:
        return NoWeightFiles("they are remote")
    if other := _second_source(model.hf_config):
        return NoWeightFiles(f"the model takes a part of them from another model ({other})")
    path = Path(source)
    if path.is_file():
        # Beside a single file nothing else is loaded.
        return WeightFiles((path.absolute(),))
    folder = path if path.is_dir() else _snapshot(source, model.revision, load.download_dir)
    if folder is None:
        return NoWeightFiles(f"{source!r} is neither a local path nor in the local hub cache")
    return _in_folder(folder, code=bool(model.trust_remote_code))


def _in_folder(folder: Path, *, code: bool) -> WeightFiles | NoWeightFiles:
    weights: list[Path] = []
    beside: list[Path] = []
    folder = folder.absolute()
    for parent, folders, names in os.walk(folder, followlinks=True):  # links may form a loop: hence a depth
        deep = len(Path(parent).relative_to(folder).parts) >= _DEPTH
        folders[:] = [] if deep else [name for name in folders if not _ignored_folder(name)]
        for name in names:
            if _matches(name, _NOT_WEIGHTS):
                continue
            if name.endswith(_WEIGHTS):
                weights.append(Path(parent, name))
            elif _matches(name, _BESIDE) or (code and name.endswith(".py")):
                beside.append(Path(parent, name))
    # Loaders do not look into a repository's original/ unless it is all there is; it often doubles the reading.
    top = [path for path in weights if path.relative_to(folder).parts[0] != "original"]
    if not weights:
        return NoWeightFiles(f"{folder.name} holds none of {', '.join(_WEIGHTS)}")
    return WeightFiles(tuple(sorted([*(top or weights), *beside])))


def _ignored_folder(name: str) -> bool:
    return name.startswith(".") or _matches(name, _NOT_LOOKED_INTO)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _own_loader(load: Any) -> bool:
    """Whether vLLM's own loader reads this format: a plugin may bring another one for a name that vLLM knows."""
    try:
        from vllm.model_executor.model_loader import get_model_loader

        return type(get_model_loader(load)).__module__.startswith("vllm.model_executor.model_loader.")
    except (ImportError, ValueError):
        return False


def _extra(load: Any) -> dict[str, Any]:
    extra = load.model_loader_extra_config
    return extra if isinstance(extra, dict) else {}


def _second_source(hf_config: Any) -> str | None:
    """A model named inside the model's config (as Ultravox names its language model), whose files lie elsewhere."""
    for key in ("text_model_id", "audio_model_id"):
        if isinstance(other := getattr(hf_config, key, None), str):
            return other
    return None


def _snapshot(repo: str, revision: str | None, cache_dir: str | None) -> Path | None:
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # another hub, with a cache of its own
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None
