"""The parts that policies are made of: each a small file with its source. They know shapes and tensors, nothing of
tiers, files or transformers."""
