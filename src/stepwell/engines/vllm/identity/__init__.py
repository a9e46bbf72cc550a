"""Identity of an engine's KV, which decides with whom it is shared: facts about model, weights, pages and adapters, and
what cannot be served.

facts           model and layout as text          weights         files to fingerprint
values          settings as text                  adapters        LoRA settings; when vLLM loads an adapter
unsupported     what is refused, and why          page_sizes      bytes of a page
"""

from __future__ import annotations
