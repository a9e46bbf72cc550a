"""`stepwell fidelity`: what a decode-time policy costs in accuracy, and what it moves for that.

Seeded tasks whose answers need many facts of a long prompt, teacher-forced, each policy beside full attention on the
same exactly prefilled KV: `tasks` makes the documents, `prefill` the reference, `runner` runs a policy (the only file
that knows stepwell.longctx), `metrics` compares, `bootstrap` says how sure that is, `matrix` goes through everything,
`report` shows it. `constructed` measures key indexes on attention of known truth, without a model.
"""
