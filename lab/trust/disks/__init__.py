"""What the campaigns over failing disks and power cuts share."""

from __future__ import annotations
