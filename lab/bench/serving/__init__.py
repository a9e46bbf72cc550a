"""Measurements with real engines: a model in vLLM, with a well beside it."""

from __future__ import annotations
