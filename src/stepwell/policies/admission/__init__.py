"""Whether a block is let into a tier: one file for each policy."""
