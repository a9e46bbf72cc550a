"""The devices."""

from __future__ import annotations

from lab.rig.devices import device as device
