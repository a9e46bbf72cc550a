"""Tiny drafters with random weights for tiny targets with random weights, one for each way of drafting with a model.

Of so few tokens a drafter that knows nothing is right now and then, and when depends on all that it attends to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.rig.tiny import ROPE, Config, randomise, write_model

VOCABULARY, GAIN = 8, 4.0
SIZE, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 128, 4, 2, 32, 256, 3
TARGET: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": ROPE,
}
WITH_MTP = TARGET | {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
DRAFTS = 3

Shapes = dict[str, tuple[int, ...]]


def write_pair(method: str, folder: Path, seed: int = 1) -> tuple[Path, dict[str, Any]]:
    """A target and what vLLM's `speculative_config` says of its drafter, whose weights are those of this seed."""
    if method == "mtp":
        model = write_model(WITH_MTP, folder / "model", gain=GAIN)
        _save(_mtp(), model / "model-mtp.safetensors", seed)
        return model, {"method": method, "num_speculative_tokens": 1}
    model, drafter = write_model(TARGET, folder / "model", gain=GAIN), folder / f"drafter-{seed}"
    if method == "draft_model":
        write_model(TARGET, drafter, seed, GAIN)
    else:
        architecture, shapes = HEADS_OF[method]
        drafter.mkdir(parents=True, exist_ok=True)
        config = TARGET | {"architectures": [architecture], "num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}
        (drafter / "config.json").write_text(json.dumps(config))
        _save(shapes(), drafter / "model.safetensors", seed)
    return model, {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFTS}


def _save(shapes: Shapes, file: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    randomise(weights.values(), seed, GAIN)
    save_file(weights, file)


def _layer(name: str, read: int = SIZE) -> Shapes:
    """One layer of attention, which reads so many values, and a network behind it."""
    return {
        f"{name}.self_attn.q_proj.weight": (HEADS * HEAD, read),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD, read),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD, read),
        f"{name}.self_attn.o_proj.weight": (SIZE, HEADS * HEAD),
        f"{name}.mlp.gate_proj.weight": (INNER, SIZE),
        f"{name}.mlp.up_proj.weight": (INNER, SIZE),
        f"{name}.mlp.down_proj.weight": (SIZE, INNER),
        f"{name}.post_attention_layernorm.weight": (SIZE,),
    }


def _eagle() -> Shapes:
    return _layer("layers.0") | {"fc.weight": (SIZE, 2 * SIZE)}


def _eagle3() -> Shapes:
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
    vectors: Shapes = {f"{name}.weight": (SIZE,) for name in norms}
    return _layer("layers.0", 2 * SIZE) | vectors | {"fc.weight": (SIZE, 3 * SIZE)}


def _mtp() -> Shapes:
    name = "model.mtp_layers.0"
    norms = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    vectors: Shapes = {f"{name}.{norm}.weight": (SIZE,) for norm in norms}
    biases: Shapes = {
        f"{name}.self_attn.q_proj.bias": (HEADS * HEAD,),
        f"{name}.self_attn.k_proj.bias": (KV_HEADS * HEAD,),
        f"{name}.self_attn.v_proj.bias": (KV_HEADS * HEAD,),
    }
    return _layer(name) | vectors | biases | {f"{name}.input_proj.weight": (SIZE, 2 * SIZE)}


HEADS_OF: dict[str, tuple[str, Callable[[], Shapes]]] = {
    "eagle": ("EagleLlamaForCausalLM", _eagle),
    "eagle3": ("LlamaForCausalLMEagle3", _eagle3),
}
