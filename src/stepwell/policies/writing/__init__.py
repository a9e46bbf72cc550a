"""Write policies: when blocks of host memory are written to the tier below; one file for each policy."""
