"""`python -m lab.bench.longctx`: what `stepwell.longctx` promises, measured.

One small module for each promise: `exact`, `overhead`, `pipeline`, `verified`, `beyond`, and the anchors `hits`
(KVDrive), `predicted` (ScoutAttention) and `near` (HillInfer). The model is the demo's, in float32 on the CPU, unless a
row says otherwise. Accuracy against bytes is `stepwell fidelity`'s.
"""
