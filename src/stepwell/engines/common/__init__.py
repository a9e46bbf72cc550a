"""Parts that adapters share, whatever their engine: adapters import them, and they import no engine.

plan            what the halves tell each other, and sizes of pages, blocks and shards
requests        what a scheduler half remembers of each request
steps           steps under way, what they confirm and cost, and how much one may copy
weights         what stands for the weights: a name, or a fingerprint
adapters        which adapter a request runs with, by the content of its files
canaries        prefixes that are computed and compared instead of recalled
loads           how recalls get into pages: at once, or as their blocks land
worker_half     executes plans in a worker, as `tasks` that are each answered once
counts          what the engine's own metrics say of stepwell
log_messages    what its log says of it
"""

from __future__ import annotations
