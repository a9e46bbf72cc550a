"""Adapters: what each inference engine calls its KV, translated once into stepwell's words.

The only layer that may import an engine, torch or transformers. Adapters know the client, never the well's inside.
"""

from __future__ import annotations
