"""Versions of the protocol, and how much a message may say. Engines and well share these numbers."""

from __future__ import annotations

import numpy as np

PROTOCOL = 5
"""Version spoken here. A well accepts this one and the one before it, whose engines say nothing of KV cache groups,
facts and flags."""

OLDEST_PROTOCOL = 4

LOOKS = "looks"
"""Flag of a well that knows `Look`: one that does not ends the session."""

MAX_MESSAGE = 16 << 20
"""Largest message in bytes; a longer one ends the connection."""

MAX_DIGESTS = 1 << 18
"""Most digests in one Ask or Look: 256 Ki blocks, far beyond any context."""

MAX_GROUPS = 64
"""KV cache groups of a model."""

MAX_FLAGS = 64
"""Optional abilities in one Hello."""

MAX_TIMINGS = 256
"""Steps in one Timings, and as many copies."""

MAX_LISTED = 4096
"""Leases, transfers or sessions in one list."""

MAX_COUNTS = 256
"""Names in one Report."""

MAX_ASKED = 32 * MAX_DIGESTS + (64 << 10)
"""Bytes of the longest message of a scheduler, an Ask."""

MAX_ACKNOWLEDGED = 128 << 10
"""Bytes of the longest message of a worker, a Filled."""

PIECE = 64
"""Numbers of a list that are handled before others get their turn."""

MAX_ALLOWED_S = 0.25
"""Most of `Found.allow_s`: a well says no more, and a client believes no more."""

SLOT_REF = np.dtype([("slab", "<u4"), ("slot", "<u4"), ("generation", "<u8")])
"""Where one shard of a block lies. Blocks come as C-ordered arrays of shape (blocks, shards)."""
