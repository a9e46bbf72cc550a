"""Tests of the campaigns. Those marked `kernel` run campaigns in a small size on filesystems that really fail."""

from __future__ import annotations
