"""Tensors that a cache writes to repeatedly, in any autograd mode of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def writable() -> Iterator[None]:
    """Tensors made inside, under `torch.inference_mode()` too, may be written to outside of it. Turns gradients off in
    that mode; in others it changes nothing."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
