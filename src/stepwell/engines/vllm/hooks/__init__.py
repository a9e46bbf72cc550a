"""What vLLM's connector interface asks for: hooks that fail open, classes that it carries, counts for its metrics."""

from __future__ import annotations
