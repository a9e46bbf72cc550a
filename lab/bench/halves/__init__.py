"""Measurements of the adapter's halves, or of their clients, over a real well, without a model."""

from __future__ import annotations
