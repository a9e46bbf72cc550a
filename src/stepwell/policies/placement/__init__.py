"""Placement policies: host memory or the tier below; one file for each policy."""
