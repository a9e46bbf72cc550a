"""Eviction policies: which block leaves when room is needed; one file for each policy."""
