"""The loss of a micro-batch of rollouts, by the names of --loss, and its metrics.

Options that are None have the default of the loss (`ligermodels.losses.policy`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels import losses
from ligermodels.aliases import flag_of
from ligermodels.errors import InputError
from ligermodels.kernels.losses.linear_logprobs import LogProbs
from ligermodels.losses import next_entropy_coef, segment_means, segment_sums
from ligermodels.training.objectives.grpo.rollouts import RolloutBatch
from ligermodels.training.settings.config import FIELDS, TrainConfig

CLIP = ("epsilon", "epsilon_high")
RATIO = ("importance_sampling_level",)


class PolicyLoss(NamedTuple):
    """A loss of --loss.

    unit says what the sum is divided by: "completions" or "tokens" of the step, or "longest", completions times the
    longest possible. options are those that the function takes. of_tokens says whether its ratios are those of tokens
    by default. clipping has the arguments of `clipped_tokens` that are not its defaults.
    """

    function: Callable[..., Tensor]
    unit: str
    options: tuple[str, ...]
    of_tokens: bool = False
    clipping: Mapping[str, Any] = {}


POLICY_LOSSES = {
    "grpo": PolicyLoss(losses.grpo, "completions", (*CLIP, "delta", *RATIO), of_tokens=True),
    "dapo": PolicyLoss(losses.dapo, "tokens", (*CLIP, "delta", *RATIO), of_tokens=True),
    "bnpo": PolicyLoss(losses.bnpo, "tokens", (*CLIP, "delta", *RATIO), of_tokens=True),
    "dr_grpo": PolicyLoss(losses.dr_grpo, "longest", (*CLIP, "delta", *RATIO), of_tokens=True),
    "luspo": PolicyLoss(
        losses.luspo, "completions", (*CLIP, "delta", *RATIO), clipping={"importance_sampling_level": "sequence"}
    ),
    "cispo": PolicyLoss(losses.cispo, "tokens", ("epsilon_high", *RATIO), of_tokens=True),
    "sapo": PolicyLoss(losses.sapo, "completions", RATIO, of_tokens=True),
    "vespo": PolicyLoss(losses.vespo, "tokens", ()),
    "gmpo": PolicyLoss(losses.gmpo, "completions", CLIP, clipping={"epsilon": 0.4, "logarithmic": True}),
    "rloo": PolicyLoss(losses.rloo, "completions", CLIP, clipping={"importance_sampling_level": "completion"}),
}


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The loss and what is added to it; names as in `losses.policy` and `losses.policy_weights`.

    sampler_correction: mode of `sampler_weights`, None for none; sampler_clip, sampler_clip_min: its bounds. longest:
    the most tokens that a completion may have. Raises InputError for an option that the loss does not have.
    """

    name: str
    longest: int
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    sampler_correction: str | None = None
    sampler_clip: float = 3.0
    sampler_clip_min: float | None = None
    off_policy_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.name not in POLICY_LOSSES:
            raise InputError(f"--loss {self.name}: must be one of {', '.join(POLICY_LOSSES)}")
        for option in (*CLIP, "delta", *RATIO):
            if getattr(self, option) is not None and option not in self.loss.options:
                raise InputError(f"{flag_of(option)} has no effect with --loss {self.name}: leave it out")
        high = 1 + (self.epsilon_high or self.epsilon or 0.2)
        if self.delta is not None and self.delta <= high:
            raise InputError(f"--delta {self.delta:g}: must be above 1 + --epsilon-high, {high:g}")

    @property
    def loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.name]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the loss's function that are not its defaults."""
        return {name: getattr(self, name) for name in self.loss.options if getattr(self, name) is not None}

    @property
    def penalises_kl(self) -> bool:
        """Whether the KL divergence is a term of the loss."""
        return self.beta > 0 and self.name != "rloo"

    @property
    def subtracts_kl(self) -> bool:
        """Whether β times the KL divergence of a completion is subtracted from its reward: RLOO's."""
        return self.beta > 0 and self.name == "rloo"

    def reads_tokens_alone(self, row: RolloutBatch) -> bool:
        """Whether a token's term of the loss depends on no other token's log-probability under the policy.

        Ratios of completions read all of its tokens. So does the sampler's correction of completions, as long as the
        policy before the update is the one that is trained.
        """
        ratios = self.loss.of_tokens and self.importance_sampling_level in (None, "token")
        corrected = (self.sampler_correction or "").startswith("sequence") and row.old_logprobs is None
        return ratios and not corrected and self.off_policy_threshold is None

    def divisor(self, completions: int, tokens: int) -> int:
        """What the sum over the step is divided by; at least 1."""
        units = {"completions": completions, "tokens": tokens, "longest": completions * self.longest}
        return max(1, units[self.loss.unit])


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
        name=names[0], longest=config.longest_completion, epsilon=config.epsilon, epsilon_high=config.epsilon_high,
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


def policy_loss(options: PolicyOptions, row: RolloutBatch, logprobs: Tensor, only: Tensor | None = None) -> Tensor:
    """The sum of the loss over a micro-batch, a scalar with a graph, without the entropy's term. logprobs: fp32 [N].

    only: fp32 [N] of 0 and 1, the tokens whose terms are added, of a loss that reads tokens alone.
    """
    cu_seqlens = row.batch.completions
    old = logprobs.detach() if row.old_logprobs is None else row.old_logprobs
    arguments = dict(options.arguments)
    weights: list[Tensor] = []
    if options.sampler_correction:
        correct = losses.sampler_log_weights if options.name == "vespo" else losses.sampler_weights
        correction = correct(
            old, row.sampling_logprobs, cu_seqlens, mode=options.sampler_correction, clip_max=options.sampler_clip,
            clip_min=options.sampler_clip_min,
        )  # fmt: skip
        if options.name == "vespo":
            arguments["sampler_log_weights"] = correction
        else:
            weights.append(correction)
    if options.off_policy_threshold is not None:
        weights.append(
            losses.off_policy_mask(
                logprobs, row.sampling_logprobs, row.advantages, cu_seqlens, options.off_policy_threshold
            )
        )
    if row.token_mask is not None:
        if options.name == "gmpo":
            arguments["token_mask"] = row.token_mask
        else:
            weights.append(row.token_mask)
    if only is not None:
        weights.append(only)
    if weights:
        arguments["token_weights"] = torch.stack(weights).prod(0)
    if options.penalises_kl:
        penalty = options.beta * kl_of_tokens(options, row, logprobs)
        arguments["token_penalty"] = penalty if only is None else penalty * only
    return options.loss.function(logprobs, row.old_logprobs, row.advantages, cu_seqlens, **arguments)


def kl_of_tokens(options: PolicyOptions, row: RolloutBatch, logprobs: Tensor) -> Tensor:
    assert row.ref_logprobs is not None
    return losses.kl_penalty(
        logprobs, row.ref_logprobs, row.old_logprobs, row.batch.completions,
        importance_sampling_level=options.importance_sampling_level or "token",
        use_bias_correction_kl=options.use_bias_correction_kl,
    )  # fmt: skip


@torch.no_grad()
def metric_sums(
    options: PolicyOptions, row: RolloutBatch, found: LogProbs
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns (sums, maxima) of a micro-batch's tokens, from which `step_metrics` makes TRL's metrics."""
    logprobs, cu_seqlens = found.logprobs.detach(), row.batch.completions
    assert found.entropy is not None
    old = logprobs if row.old_logprobs is None else row.old_logprobs
    difference = (old - row.sampling_logprobs).abs()
    sums = {
        "tokens": cu_seqlens[-1].double(),
        "entropy": segment_sums(found.entropy.detach(), cu_seqlens).sum(),
        "unmasked_entropy": losses.entropy_sum(found.entropy.detach(), cu_seqlens, row.token_mask),
        "unmasked_tokens": cu_seqlens[-1].double() if row.token_mask is None else row.token_mask.double().sum(),
        "sampling_difference": segment_sums(difference, cu_seqlens).sum(),
    }
    maxima = {"sampling_difference": difference.max()}
    if row.ref_logprobs is not None:
        sums["kl"] = segment_sums(kl_of_tokens(options, row, logprobs), cu_seqlens).sum()
    if "epsilon" in options.loss.options:
        given = {name: value for name, value in options.arguments.items() if name in (*CLIP, *RATIO)}
        bounds = {**options.loss.clipping, **given}
        low, high = losses.clipped_tokens(logprobs, old, row.advantages, cu_seqlens, **bounds)
        low_means, high_means = segment_means(low, cu_seqlens), segment_means(high, cu_seqlens)
        if bounds.get("importance_sampling_level", "token") == "token":
            low, high, units = segment_sums(low, cu_seqlens), segment_sums(high, cu_seqlens), cu_seqlens[-1]
        else:  # each completion has one ratio, and counts once
            low, high, units = low_means, high_means, (cu_seqlens.diff() > 0).sum()
        sums |= {"clipped_low": low.sum(), "clipped_high": high.sum(), "clip_units": units.double()}
        # Of a row of padding alone, what changes neither extreme.
        maxima["clipped_high"] = torch.cat([high_means, high_means.new_zeros(1)]).max()
        maxima["not_clipped_low"] = 1 - torch.cat([low_means, low_means.new_ones(1)]).min()
    return sums, maxima


def step_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an update under TRL's names, from the sums and maxima over all micro-batches and ranks."""
    tokens = max(1.0, sums["tokens"])
    metrics = {
        "entropy": sums["entropy"] / tokens,
        "sampling/sampling_logp_difference/mean": sums["sampling_difference"] / tokens,
        "sampling/sampling_logp_difference/max": maxima["sampling_difference"],
    }
    if "kl" in sums:
        metrics["kl"] = sums["kl"] / tokens
    if "clipped_low" in sums:
        units = max(1.0, sums["clip_units"])
        metrics |= {
            "clip_ratio/low_mean": sums["clipped_low"] / units,
            "clip_ratio/low_min": 1 - maxima["not_clipped_low"],
            "clip_ratio/high_mean": sums["clipped_high"] / units,
            "clip_ratio/high_max": maxima["clipped_high"],
            "clip_ratio/region_mean": (sums["clipped_low"] + sums["clipped_high"]) / units,
        }
    return metrics


class EntropyControl:
    """The weight of the entropy in the loss. Without a target it stays as it was given.

    With one, a step adds the entropy only where that of the step before was at most the target, and the weight rises or
    falls by 0.005 a step. With --top-entropy, both are of the tokens that are trained on.
    Source: Skywork-OR1, arXiv 2505.22312, as TRL has it.
    """

    def __init__(self, weight: float, target: float | None) -> None:
        self.target = target
        # Of the next step, and the entropy per token of the last one: as a tensor, which a checkpoint fills in place.
        self.values = torch.tensor([weight, math.inf], dtype=torch.float64)

    @property
    def is_used(self) -> bool:
        return self.target is not None or self.weight > 0

    @property
    def weight(self) -> float:
        return float(self.values[0])

    @property
    def applied(self) -> float:
        """The weight in the loss of the next step."""
        return self.weight if self.target is None or float(self.values[1]) <= self.target else 0.0

    def finish_step(self, entropy: float) -> None:
        """Takes the entropy of the step, per token. A step that is not finite changes nothing."""
        if self.target is not None and math.isfinite(entropy):
            weight = next_entropy_coef(self.weight, entropy, entropy_target=self.target)
            self.values.copy_(torch.tensor([weight, entropy]))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint saves."""
        return {} if self.target is None else {"entropy_control": self.values}
