"""A memory hierarchy for the KV cache of LLM inference.

`open()` gives a well inside this process; engines reach a shared one through `stepwell.client`.
Importing this package loads nothing else: engines import it in every one of their processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.hierarchy.local import open_well as open

__all__ = ["__version__", "open"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "open":
        # By name, so that this top package has no import of its own in the layer graph.
        return import_module("stepwell.hierarchy.local").open_well
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
