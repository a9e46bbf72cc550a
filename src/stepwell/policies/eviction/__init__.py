"""Which block goes when room is needed: one file for each policy."""
