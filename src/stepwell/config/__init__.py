"""The well's configuration: what can be set, and where each value came from."""

from __future__ import annotations

from stepwell.config.loader import Loaded, load
from stepwell.config.settings import Settings, check_sizes

__all__ = ["Loaded", "Settings", "check_sizes", "load"]
