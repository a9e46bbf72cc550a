"""`stepwell fidelity`: the accuracy that a decode-time policy costs, and the bytes that it moves.

Seeded tasks whose answers need many facts of a long prompt, teacher-forced, each policy beside full attention on the
same exactly prefilled KV. `tasks` makes the documents, `prefill` the reference; `runner` runs a policy (the only file
that imports stepwell.longctx), `matrix` all combinations; `results` compares and reports. `constructed` measures key
indexes on attention of known truth, without a model.
"""
