"""The devices."""

from __future__ import annotations

from lab.rig.suite.devices import device as device
