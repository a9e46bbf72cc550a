"""The vLLM adapter: a KV connector, and what it needs to know about vLLM's configs, pages and steps.

Importing this package imports nothing: vLLM loads the connector's module by name in every one of its processes.
"""

from __future__ import annotations
