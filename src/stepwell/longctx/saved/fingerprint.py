"""Identity of a model by everything that it computes with: a saved context belongs to one fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import blake3
import torch

from stepwell.errors import IdentityMismatch

_DOMAIN = b"stepwell context fingerprint 1"
_HOW_IT_RUNS = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate",
    "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset", "attn_implementation",
    "_experts_implementation", "_experts_implementation_internal", "experts_implementation",
})  # fmt: skip
"""Fields of a configuration that say where a model came from or how it is run, not what it computes. Dtypes count as
those of the tensors; the configuration only names the one that was asked for when it was loaded, if any."""


def fingerprint(model: Any) -> bytes:
    """BLAKE3 (32 bytes) over the model's class, its effective configuration, and name, dtype, shape and bytes of every
    parameter and buffer, those that are not saved included (RoPE frequencies are among them). `model`: a
    PreTrainedModel.

    The same weights loaded twice, from any place and with any attention implementation, have the same fingerprint.
    Reads all weights once, with all cores; those on a device are copied to the host tensor by tensor. Raises
    IdentityMismatch SW-403 if not all of them are there, or if adapters are: which of them is active is not in the
    weights.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update(_DOMAIN)
    _add(hasher, f"{type(model).__module__}.{type(model).__qualname__}".encode())
    _add(hasher, _configuration(model.config))
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise _unknown("it has adapters, and which of them is active is not in its weights")
    for name, tensor in sorted(_tensors(model), key=lambda named: named[0]):
        if tensor.is_meta or tensor.layout != torch.strided:
            raise _unknown(f"{name} is not in memory")
        _add(hasher, f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        _add(hasher, content.numpy().data)
    return bytes(hasher.digest())


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _configuration(config: Any) -> bytes:
    return json.dumps(_what_it_computes(config.to_dict()), sort_keys=True, default=str).encode()


def _what_it_computes(value: Any) -> Any:
    """A nested configuration (of a text model in a larger one) is stripped as well; keys become text."""
    if isinstance(value, dict):
        return {str(key): _what_it_computes(part) for key, part in value.items() if key not in _HOW_IT_RUNS}
    if isinstance(value, (list, tuple)):
        return [_what_it_computes(part) for part in value]
    return value


def _add(hasher: blake3.blake3, part: bytes | memoryview) -> None:
    """Adds the part's length first, so that no two sequences of parts are the same bytes."""
    hasher.update(len(part).to_bytes(8, "little"))
    hasher.update(part)


def _unknown(why: str) -> IdentityMismatch:
    return IdentityMismatch(
        "SW-403",
        what="this model cannot be distinguished from others",
        why=why,
        fix="load it into memory as a whole, with its adapters merged into it; or do not save contexts of it",
    )
