"""What the flags of reinforcement learning say, and their defaults: the loss, its reference, how rewards become
advantages. Must not know models.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.aliases import flag_of
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.losses import group_advantages, rloo_advantages
from ligermodels.training.objectives.grpo.judging import JudgedGeneration, has_spread, weighted_totals
from ligermodels.training.objectives.grpo.policy import PolicyOptions
from ligermodels.training.objectives.preference.references import (
    ReferenceSpec,
    default_reference,
    make_live_reference,
    parse_reference,
)
from ligermodels.training.optimizers.schedules import default_learning_rate
from ligermodels.training.planning.defaults import Choice
from ligermodels.training.settings.config import FIELDS, TrainConfig

MOST_PROMPTS, TINY_PROMPTS = 16, 4
LEARNING_RATE = 5e-6  # five times TRL's, at which a reward rises little in 60 steps; ten times that for LoRA
WARMUP_FRACTION, GRPO_VALIDATIONS = 0.03, 10
MOST_ROW_TOKENS = 8192  # of a packed row, where no single completion needs more


def policy_options(config: TrainConfig) -> PolicyOptions:
    """The loss of the flags. Raises InputError for one that has no effect on it."""
    names = config.loss or ("dapo",)
    if len(names) > 1:
        raise InputError(f"--loss {' '.join(names)}: reinforcement learning has one loss; name one of them")
    if names[0] == "rloo" and not config.kl_correction:
        raise InputError("--kl-correction off has no effect with --loss rloo: leave it out")
    if names[0] == "rloo" and config.scale_rewards is not None:
        raise InputError("--scale-rewards has no effect with --loss rloo: leave it out")
    if names[0] == "rloo" and config.reward_aggregation != FIELDS["reward_aggregation"].default:
        raise InputError(
            f"--reward-aggregation {config.reward_aggregation} has no effect with --loss rloo: leave it out"
        )
    if not config.kl_correction and not config.beta:
        raise InputError("--kl-correction off goes with --beta, which is missing")
    refuse_unused_clips(config)
    return PolicyOptions(
        name=names[0], longest=config.max_completion_length, epsilon=config.epsilon, epsilon_high=config.epsilon_high,
        delta=config.delta, importance_sampling_level=config.importance_sampling_level, beta=config.beta or 0.0,
        use_bias_correction_kl=config.kl_correction, sampler_correction=sampler_correction(config),
        sampler_clip=config.sampler_clip, sampler_clip_min=config.sampler_clip_min,
        off_policy_threshold=config.off_policy_threshold,
    )  # fmt: skip


def sampler_correction(config: TrainConfig) -> str | None:
    """The mode of `losses.sampler_weights`, None for none. vLLM's log-probabilities differ from the policy's: it has
    one by default, TRL's."""
    mode = config.sampler_correction or ("sequence_mask" if config.sampler == "vllm" else "none")
    return None if mode == "none" else mode


def refuse_unused_clips(config: TrainConfig) -> None:
    """Raises InputError for bounds of the sampler's correction without one, or of which none is left."""
    low, high = config.sampler_clip_min, config.sampler_clip
    if sampler_correction(config) is None:
        for name in ("sampler_clip", "sampler_clip_min"):
            if getattr(config, name) != FIELDS[name].default:
                raise InputError(f"{flag_of(name)} goes with --sampler-correction, which is missing")
    if low is not None and low >= high:
        raise InputError(f"--sampler-clip-min {low:g}: must be below --sampler-clip, {high:g}")


def reference_spec(config: TrainConfig, policy: PolicyOptions, world: World) -> ReferenceSpec | None:
    """What --reference says; None without a KL divergence. Raises InputError for a kind that does not fit."""
    if not policy.beta:
        if config.reference is not None:
            raise InputError(f"--reference {config.reference} goes with --beta, which is missing")
        return None
    kind = default_reference(config)
    spec = parse_reference(config.reference or ("model" if kind == "precomputed" else kind))
    if spec.kind == "precomputed":
        raise InputError(
            "--reference precomputed: completions are sampled during the run; take base with LoRA, model, or ema"
        )
    make_live_reference(spec, config, world)
    return spec


def grpo_choices(config: TrainConfig, count: int, longest_prompt: int, hidden_size: int) -> dict[str, Choice]:
    """The settings that were not given, for `count` prompts of which the longest has so many tokens."""
    prompts = min(TINY_PROMPTS if config.is_tiny else MOST_PROMPTS, max(1, count))
    epochs = config.epochs or 1.0
    steps = math.ceil(epochs * count / (config.prompts or prompts)) * config.iterations
    taken = config.steps or steps
    rate = LEARNING_RATE * 10 if config.with_lora else LEARNING_RATE
    if config.has_new_weights:
        rate = default_learning_rate(hidden_size, pretrained=False, lora=config.with_lora)
    group = longest_prompt - 1 + config.generations * (config.max_completion_length + 1)
    length = max(longest_prompt + config.max_completion_length, min(group, MOST_ROW_TOKENS))
    return {
        "sequence_length": Choice(length, "a group of the longest prompt" if length == group else ""),
        "prompts": Choice(prompts),
        "steps": Choice(steps, f"{epochs:g} epoch{'' if epochs == 1 else 's'}"),
        "learning_rate": Choice(rate, "grpo"),
        "warmup": Choice(min(math.ceil(WARMUP_FRACTION * taken), taken - 1), f"{WARMUP_FRACTION:.0%} of the steps"),
        "eval_every": Choice(math.ceil(taken / GRPO_VALIDATIONS), f"{GRPO_VALIDATIONS} validations"),
        "activation_checkpointing": Choice("auto", "as much as memory demands"),
    }


def advantages_of(
    config: TrainConfig, loss: str, generation: JudgedGeneration, weights: Sequence[float], kl: Tensor
) -> Tensor:
    """fp32 [C]. weights: of the reward functions. kl: [C], which RLOO subtracts from their sum, times beta."""
    if loss == "rloo":
        totals = weighted_totals(generation.rewards, weights)
        return rloo_advantages(totals - (config.beta or 0.0) * kl, config.generations)
    return group_advantages(
        generation.rewards, config.generations, reward_weights=weights, scale_rewards=config.scale_rewards or "group",
        multi_objective_aggregation=config.reward_aggregation,
    )  # fmt: skip


def kept_completions(config: TrainConfig, generation: JudgedGeneration, weights: Sequence[float]) -> Tensor:
    """bool [C]: the completions that updates read."""
    rewards = generation.rewards
    kept = torch.ones(len(rewards), dtype=torch.bool)
    if not config.keep_zero_spread:
        summed = config.reward_aggregation == "sum_then_normalize"
        compared = weighted_totals(rewards, weights) if summed else rewards
        kept = has_spread(compared, config.generations).repeat_interleave(config.generations)
    if config.mask_truncated:
        kept &= torch.tensor([sample.finish_reason == "stop" for sample in generation.samples])
    return kept
