"""Attention in parts, over what is hot and what comes up."""
