"""Results of `stepwell fidelity`: metrics, rows, intervals, tables and charts."""
