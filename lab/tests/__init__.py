"""Tests of the lab: that measurements count right, and that campaigns find what they look for."""

from __future__ import annotations
