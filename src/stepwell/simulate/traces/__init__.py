"""Traces: requests with their times and block ids, and how they are put together, checked and loaded."""
