"""Policies that say whether a block is let into a tier, one file each."""
