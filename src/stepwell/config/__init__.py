"""The well's configuration: what can be set, and where each value came from."""

from __future__ import annotations

from stepwell.config.access import Tenant
from stepwell.config.loader import Loaded, load
from stepwell.config.places import DiskPlace
from stepwell.config.settings import Settings, allowed, check_host, check_together, queue_bytes, texts

__all__ = [
    "DiskPlace",
    "Loaded",
    "Settings",
    "Tenant",
    "allowed",
    "check_host",
    "check_together",
    "load",
    "queue_bytes",
    "texts",
]
