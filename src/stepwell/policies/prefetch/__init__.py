"""Prefetch: which blocks are promoted before a request asks for them, and when."""
