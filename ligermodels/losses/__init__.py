"""Losses of post-training, as pure functions of token log-probabilities: usable in any training loop.

A loss reads tensors that a model has already computed, on any device, and returns a sum; the caller divides it by the
number of units in the step. docs/losses.md has formulas and sources. Must not know files, models, tokenizers, ranks or
trainers.
"""

from ligermodels.losses.judged import JudgedLoss, kto, kto_kl_sum, kto_z
from ligermodels.losses.pairs import PairLoss, pair_sums
from ligermodels.losses.preference import dpo
from ligermodels.losses.reference_free import cpo, orpo, simpo
from ligermodels.losses.reward_model import RewardLoss, reward
from ligermodels.losses.segments import segment_means, segment_sums

__all__ = [
    "JudgedLoss",
    "PairLoss",
    "RewardLoss",
    "cpo",
    "dpo",
    "kto",
    "kto_kl_sum",
    "kto_z",
    "orpo",
    "pair_sums",
    "reward",
    "segment_means",
    "segment_sums",
    "simpo",
]
