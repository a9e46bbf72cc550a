"""Drafters for a small real model: itself with noise in its weights, and an EAGLE head that is trained here.

The head learns of each token in some texts the model's hidden state, and the token that the model would choose. The
same texts give the same head.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

NOISE = 0.1
"""Standard deviation of what is added to a matrix of the model, over that of the matrix."""

EPOCHS, RATE, SEED = 25, 2e-3, 0


def noisy(model: Path, folder: Path) -> Path:
    """The model with noise in the matrices of its layers."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    dice = torch.Generator().manual_seed(0)
    for name, matrix in weights.items():
        if ".layers." in name and matrix.dim() > 1:
            noise = torch.randn(matrix.shape, generator=dice) * matrix.float().std() * NOISE
            weights[name] = (matrix.float() + noise).to(matrix.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


def eagle_head(model: Path, cache: Path, texts: Sequence[Sequence[int]], epochs: int = EPOCHS) -> Path:
    """A head of one layer that has the model's embeddings, trained on these texts of one length; kept in `cache`."""
    name = hashlib.sha256(repr((RATE, SEED, epochs, [list(text) for text in texts])).encode()).hexdigest()
    kept = cache / f"eagle-head-{name[:16]}"
    if not kept.is_dir():
        with tempfile.TemporaryDirectory(prefix=".eagle-head-", dir=cache) as building:
            _make_head(model, Path(building), texts, epochs)
            shutil.copytree(building, kept)
    return kept


def _make_head(model: Path, folder: Path, texts: Sequence[Sequence[int]], epochs: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # two on a busy machine spin at each other's barriers
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().requires_grad_(False)
    tokens = torch.tensor(texts)
    states = torch.cat([target.model(one[None]).last_hidden_state for one in tokens]).float()
    head, layer = _head(target.config)
    _train(head, layer, target, states, tokens, epochs)
    config = json.loads((model / "config.json").read_text())
    changes = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | changes))
    weights = {"fc.weight": head.weight} | {f"layers.0.{name}": values for name, values in layer.named_parameters()}
    save_file({name: values.detach().bfloat16() for name, values in weights.items()}, folder / "model.safetensors")


def _head(config: Any) -> tuple[nn.Linear, nn.Module]:
    """What makes one of a token's embedding and the hidden state before it, and the layer behind that. At first it says
    the hidden state that it is given."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    size = config.hidden_size
    head, layer = torch.nn.Linear(2 * size, size, bias=False), LlamaDecoderLayer(config, 0).float()
    layer.input_layernorm = torch.nn.Identity()  # as EAGLE's first layer
    with torch.no_grad():
        for name, weights in layer.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0.0, 0.002 if "o_proj" in name or "down_proj" in name else 0.02)
        head.weight.normal_(0.0, 0.02)
        head.weight[:, size:] += torch.eye(size)
    return head, layer


def _train(head: nn.Linear, layer: nn.Module, target: Any, states: Tensor, tokens: Tensor, epochs: int) -> None:
    import torch
    from torch.nn import functional
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    chosen = torch.cat([target.lm_head(of_one.bfloat16()).argmax(-1)[None] for of_one in states])
    known, labels = torch.unique(chosen, return_inverse=True)
    out, embeddings = target.lm_head.weight[known].float(), target.model.embed_tokens.weight.float()
    places = torch.arange(tokens.shape[1] - 1)[None]
    angles = LlamaRotaryEmbedding(target.config)(states, places)
    parameters = [*head.parameters(), *layer.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    steps = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=epochs * len(tokens), pct_start=0.1)
    size, dice = states.std(), torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for at in torch.randperm(len(tokens), generator=dice).tolist():
            before = states[at, :-1]
            before = before + (torch.rand(before.shape, generator=dice) - 0.5) * 0.2 * size  # as its own drafts differ
            read = head(torch.cat((embeddings[tokens[at, 1:]], before), -1))[None]
            said = layer(read, position_ids=places, position_embeddings=angles)[0]
            loss = functional.cross_entropy(said @ out.T, labels[at, 1:])
            loss = loss + functional.smooth_l1_loss(said / size, states[at, 1:] / size)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            steps.step()
