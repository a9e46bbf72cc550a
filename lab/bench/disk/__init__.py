"""Measurements of the data path and of the disk tier, without a well."""

from __future__ import annotations
