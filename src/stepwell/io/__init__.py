"""The machine: where files lie, what memory there is, and (injectable) clock and executor.

Standard library only at import, because the engine side uses it too. Nothing here knows blocks, tiers or engines.
"""
