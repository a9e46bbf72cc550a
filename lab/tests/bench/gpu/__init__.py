"""Tests of the measurements on a GPU; these run on a CPU too."""

from __future__ import annotations
