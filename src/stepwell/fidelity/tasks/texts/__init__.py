"""English text and words that tasks are made of."""
