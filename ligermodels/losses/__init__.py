"""Losses of post-training, as pure functions of token log-probabilities or logits: usable in any training loop.

A loss reads tensors that a model has already computed, on any device, and returns a sum (those of distillation: a value
for each token); the caller divides it by the number of units in the step. docs/losses.md has formulas and sources.
"""

from ligermodels.losses.advantages import group_advantages, reward_table, rloo_advantages
from ligermodels.losses.divergences import divergence, top_k_divergence
from ligermodels.losses.judged import JudgedLoss, kto, kto_kl_sum, kto_z
from ligermodels.losses.pairs import PairLoss, RewardLoss, pair_sums, reward
from ligermodels.losses.policy import bnpo, cispo, dapo, dr_grpo, gmpo, grpo, luspo, rloo, sapo, vespo
from ligermodels.losses.policy_weights import (
    clipped_tokens,
    entropy_sum,
    importance_ratios,
    kl_penalty,
    next_entropy_coef,
    off_policy_mask,
    sampler_log_weights,
    sampler_weights,
    top_entropy_mask,
)
from ligermodels.losses.preference import dpo
from ligermodels.losses.reference_free import cpo, orpo, simpo
from ligermodels.losses.segments import per_token, segment_means, segment_sums

__all__ = [
    "JudgedLoss", "PairLoss", "RewardLoss", "bnpo", "cispo", "clipped_tokens", "cpo", "dapo", "divergence", "dpo",
    "dr_grpo", "entropy_sum", "gmpo", "group_advantages", "grpo", "importance_ratios", "kl_penalty", "kto",
    "kto_kl_sum", "kto_z", "luspo", "next_entropy_coef", "off_policy_mask", "orpo", "pair_sums", "per_token",
    "reward", "reward_table", "rloo", "rloo_advantages", "sampler_log_weights", "sampler_weights", "sapo",
    "segment_means", "segment_sums", "simpo", "top_entropy_mask", "top_k_divergence", "vespo",
]  # fmt: skip
