"""Measurements of several systems beside each other in one engine: nothing, vLLM's own tiers, stepwell's."""

from __future__ import annotations
