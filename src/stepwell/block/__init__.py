"""Nouns of identity: what a block is called and which bytes it may be exchanged for."""
