"""Attention in parts: over hot tokens, and over pages that are fetched."""
