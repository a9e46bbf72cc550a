"""The side of transformers: the cache, the handshake, and which models can be tiered."""
