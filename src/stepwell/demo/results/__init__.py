"""Results of the demo: measurements, statistics and the report."""
