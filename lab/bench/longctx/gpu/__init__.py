"""Decoding across tiers on a GPU."""

from __future__ import annotations
