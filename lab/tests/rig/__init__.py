"""Tests of the simulated world."""

from __future__ import annotations
