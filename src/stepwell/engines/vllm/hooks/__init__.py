"""Parts of vLLM's connector interface: hooks that fail open, classes that it carries, counts for its metrics."""

from __future__ import annotations
