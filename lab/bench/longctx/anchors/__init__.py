"""What published systems reach, each measured or judged with what stepwell has."""

from __future__ import annotations
