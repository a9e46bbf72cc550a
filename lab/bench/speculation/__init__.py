"""Benchmarks of engines that draft tokens."""
