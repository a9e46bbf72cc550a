"""Where a block lies, between host memory and the tier below: one file for each policy."""
