"""Messages and byte streams that nobody sends."""

from __future__ import annotations
