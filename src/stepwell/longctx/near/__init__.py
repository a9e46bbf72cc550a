"""Scoring near the data, as HillInfer does in a storage device (arXiv 2602.18750), here in a process of its own.

The process owns the cold pages (host memory and disk) and, for each layer, the key index that a policy names. Queries
go there; page numbers and scores of the best pages come back, and the pages that are then asked for. It ends with the
process that started it, and all that it holds with it.
"""
