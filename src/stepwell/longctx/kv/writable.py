"""Tensors that a cache keeps are written to again and again, in whatever mode the model runs next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def writable() -> Iterator[None]:
    """What is made inside, under `torch.inference_mode()` too, may be written to outside of it. Without gradients in
    that mode; in others it changes nothing."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
