"""Tiny models with random weights, one for each way in which a model's layers keep their KV, as checkpoints of files.

Weights are large enough for a wrong page to change the answer; those of vLLM's own dummy loader are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Config = dict[str, Any]

WINDOW, CHUNK = 64, 128
VOCABULARY = 1024
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": ROPE}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
WINDOWED, FULL, CHUNKED, CONVOLUTION = "sliding_attention", "full_attention", "chunked_attention", "conv"


def _config(architecture: str, kind: str, layer_types: list[str], **more: Any) -> Config:
    base: Config = {
        "architectures": [architecture],
        "model_type": kind,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": WINDOW,
        "rope_parameters": ROPE,
    }
    return base | more


KINDS: dict[str, Config] = {
    "llama": _config("LlamaForCausalLM", "llama", [FULL] * 3, sliding_window=None, tie_word_embeddings=False),
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        [WINDOWED] * 5 + [FULL],
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters=ROPES,
    ),
    # Layers with all tokens have heads twice as wide: a page of theirs is of half as many tokens.
    "gemma4": _config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        [WINDOWED] * 5 + [FULL],
        hidden_activation="gelu_pytorch_tanh",
        global_head_dim=64,
        num_global_key_value_heads=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        rope_parameters=ROPES,
    ),
    "llama4": _config(
        "Llama4ForCausalLM",
        "llama4_text",
        [CHUNKED] * 3 + [FULL],
        attention_chunk_size=CHUNK,
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        moe_layers=[],
        interleave_moe_layer_step=0,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
        floor_scale=8192,
    ),
    "gpt-oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        [WINDOWED, FULL] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        attention_bias=True,
        rope_parameters=YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "cohere2": _config("Cohere2ForCausalLM", "cohere2", [WINDOWED] * 3 + [FULL], layer_norm_eps=1e-5, logit_scale=1.0),
    "olmo3": _config("Olmo3ForCausalLM", "olmo3", [WINDOWED] * 3 + [FULL], num_key_value_heads=4),
    "olmo3 without windows": _config("Olmo3ForCausalLM", "olmo3", [FULL] * 4, num_key_value_heads=4),
    # Layers of convolutions keep the last two inputs: a state. Behind all attention it would matter to the next two
    # tokens only.
    "lfm2": _config(
        "Lfm2ForCausalLM",
        "lfm2",
        [CONVOLUTION] * 3 + [FULL],
        conv_L_cache=3,
        conv_dim=128,
        conv_bias=False,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        norm_eps=1e-5,
    ),
    # vLLM's kernels for CPUs are made for latent vectors of these sizes.
    "deepseek": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        [FULL] * 3,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        head_dim=64,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        topk_method="noaux_tc",
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
        sliding_window=None,
    ),
}


def write_tokenizer(folder: Path) -> None:
    """One in which each byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: token for token, letter in enumerate(letters, 3)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(config: Mapping[str, Any], folder: Path, seed: int = 0, gain: float = 1.5) -> Path:
    """Writes a float32 checkpoint of this configuration and a tokenizer, the same ones each time. `gain`: how sharply
    attention chooses, too."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    randomise(model.parameters(), seed, gain)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def randomise(parameters: Iterable[Any], seed: int, gain: float) -> None:
    import torch

    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in parameters:
            if weights.dim() > 1:  # keeps the size of what passes through
                weights.normal_(0.0, gain / weights.shape[-1] ** 0.5, generator=dice)
            else:
                weights.uniform_(0.4, 1.2, generator=dice)
