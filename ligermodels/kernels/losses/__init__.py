"""Cross-entropy, log-probabilities and divergences, of logits and of a head in chunks."""
