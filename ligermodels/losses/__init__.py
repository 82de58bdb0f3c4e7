"""Losses of post-training, as pure functions of token log-probabilities: usable in any training loop.

A loss reads tensors that a model has already computed, on any device, and returns a sum; the caller divides it by the
number of units in the step. Must not know files, models, tokenizers, ranks or trainers.
"""

from ligermodels.losses.segments import segment_means, segment_sums

__all__ = ["segment_means", "segment_sums"]
