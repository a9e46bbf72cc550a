"""A memory hierarchy for the KV cache of LLM inference.

`open()` gives a library a cache of whole blocks (docs/library.md); engines reach their well through `stepwell.client`.
Importing this package loads nothing else: engines import it in every one of their processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.client.blocks import BlockClient
    from stepwell.client.kv_model import KvModel
    from stepwell.library import open_blocks as open

__all__ = ["BlockClient", "KvModel", "__version__", "open"]
__version__ = "0.1.0"

_PLACES = {
    "BlockClient": ("stepwell.client.blocks", "BlockClient"),
    "KvModel": ("stepwell.client.kv_model", "KvModel"),
    "open": ("stepwell.library", "open_blocks"),
}


def __getattr__(name: str) -> object:
    # By name, so that this top package has no import of its own in the layer graph.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, known_as = _PLACES[name]
    return getattr(import_module(module), known_as)
