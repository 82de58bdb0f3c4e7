"""Sampled completions and their rewards, from all ranks: advantages, metrics, warnings, lines of completions.jsonl."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels import distributed
from ligermodels.errors import InputError
from ligermodels.generation.requests import GeneratedSample
from ligermodels.losses import group_advantages, reward_table, rloo_advantages
from ligermodels.training.data.preferences import GroupPrompt
from ligermodels.training.objectives.grpo.reward_worker import RewardFunction, TrainerState
from ligermodels.training.objectives.grpo.rewards import CompletionBatch, Rewards, call_rewards
from ligermodels.training.objectives.grpo.sampling import as_completion
from ligermodels.training.settings.config import TrainConfig

MUCH_ZERO_SPREAD = 0.8  # of the groups: almost nothing is learned
USELESS_GENERATIONS = 10  # in a row, without a group whose rewards differ: the run ends


class RewardedGroup(NamedTuple):
    """A prompt with its samples. rewards: of each function, for each sample. extras: columns that functions added."""

    prompt: GroupPrompt
    samples: list[GeneratedSample]
    rewards: list[list[float | None]]
    extras: dict[str, list[Any]]


class RewardedGeneration(NamedTuple):
    """The groups of all ranks, by the number of their prompt. logged: what functions logged, by name."""

    groups: list[RewardedGroup]
    logged: dict[str, float]

    @property
    def samples(self) -> list[GeneratedSample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def rewards(self) -> Tensor:
        """The rewards of all functions, float64 [C, K], NaN for None."""
        functions = range(len(self.groups[0].rewards))
        return reward_table([[value for group in self.groups for value in group.rewards[k]] for k in functions])


def reward_completions(
    functions: Sequence[RewardFunction], prompts: Sequence[GroupPrompt], samples: Sequence[Sequence[GeneratedSample]],
    columns: Sequence[str], state: TrainerState, seconds: float,
) -> RewardedGeneration:  # fmt: skip
    """Calls the reward functions on this rank's completions, and gathers those of all ranks. Every rank must call it.

    columns: of the data; functions get None for those that a prompt does not have, as TRL passes them.
    Raises InputError on every rank where a function fails on one.
    """
    error, rewards = None, Rewards([])
    try:
        if prompts:
            rewards = call_rewards(functions, batch_of(prompts, samples, columns), state, seconds)
    except InputError as failure:
        error = failure
    distributed.raise_on_all(error)
    own = list(groups_of_prompts(prompts, samples, rewards))
    gathered = distributed.gather_objects((own, dict(rewards.metrics)))
    logged: dict[str, list[float]] = defaultdict(list)
    for _, metrics in gathered:
        for name, values in metrics.items():
            logged[name] += values
    groups = sorted((group for groups, _ in gathered for group in groups), key=lambda group: group.prompt.unit)
    return RewardedGeneration(groups, {name: sum(values) / len(values) for name, values in logged.items()})


def batch_of(
    prompts: Sequence[GroupPrompt], samples: Sequence[Sequence[GeneratedSample]], columns: Sequence[str]
) -> CompletionBatch:
    pairs = [(prompt, sample) for prompt, group in zip(prompts, samples, strict=True) for sample in group]
    return CompletionBatch(
        [prompt.text for prompt, _ in pairs],
        [as_completion(prompt.text, sample.text or "") for prompt, sample in pairs],
        [sample.ids for _, sample in pairs],
        {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in columns},
        [prompt.place for prompt, _ in pairs],
    )


def groups_of_prompts(
    prompts: Sequence[GroupPrompt], samples: Sequence[Sequence[GeneratedSample]], rewards: Rewards
) -> Iterator[RewardedGroup]:
    begin = 0
    for prompt, group in zip(prompts, samples, strict=True):
        part = slice(begin, begin + len(group))
        begin += len(group)
        values = [values[part] for values in rewards.values]
        yield RewardedGroup(prompt, list(group), values, {name: all[part] for name, all in rewards.extras.items()})


def weighted_totals(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """The reward of each completion, float64 [C]: the weighted sum of those that are present, NaN without any."""
    total = (rewards.nan_to_num(0.0) * torch.tensor(weights, dtype=rewards.dtype)).sum(1)
    return total.masked_fill(rewards.isnan().all(1), math.nan)


def has_spread(values: Tensor, generations: int) -> Tensor:
    """Tells whether the present rewards of a prompt's completions differ, bool [Q], in any column of values [C, …]."""
    groups = values.reshape(-1, generations, values[0].numel())
    highest = groups.nan_to_num(-math.inf).amax(1)
    return (highest > groups.nan_to_num(math.inf).amin(1)).any(1)


def generation_metrics(generation: RewardedGeneration, functions: Sequence[RewardFunction]) -> dict[str, float]:
    """The metrics of a generation under TRL's names."""
    rewards, samples = generation.rewards, generation.samples
    size = len(generation.groups[0].samples)
    totals = weighted_totals(rewards, [function.weight for function in functions])
    metrics = {
        "reward": mean(totals), "reward_std": float(std(totals)),
        "frac_reward_zero_std": 1 - float(has_spread(totals, size).double().mean()),
    }  # fmt: skip
    for function, values in zip(functions, rewards.T, strict=True):
        metrics |= {f"rewards/{function.name}/mean": mean(values), f"rewards/{function.name}/std": float(std(values))}
    lengths = [len(sample.ids) for sample in samples]
    ended = [len(sample.ids) for sample in samples if sample.finish_reason == "stop"]
    metrics |= {
        "completions/mean_length": sum(lengths) / len(lengths), "completions/min_length": min(lengths),
        "completions/max_length": max(lengths), "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": sum(ended) / max(1, len(ended)),
    }  # fmt: skip
    return metrics | generation.logged


def pass_fraction(values: Tensor, count: int) -> float:
    """The fraction of prompts of which one completion has a reward of 1 or more: pass@count. values are those of one
    function, for `count` completions of each prompt."""
    return float((values.view(-1, count).nan_to_num(0.0) >= 1).any(1).double().mean())


def mean(values: Tensor) -> float:
    """The mean of the values that are present; 0 without any."""
    return float(values.nanmean().nan_to_num(0.0))


def std(values: Tensor) -> Tensor:
    """The standard deviation of the values that are present, with n − 1; 0 of fewer than two."""
    present = values[~values.isnan()]
    return present.std() if len(present) > 1 else torch.zeros((), dtype=values.dtype)


def completion_lines(
    generation: RewardedGeneration, functions: Sequence[RewardFunction], advantages: Sequence[float], step: int
) -> Iterator[str]:
    """Yields a JSON object for each completion."""
    number = iter(advantages)
    for group in generation.groups:
        for index, sample in enumerate(group.samples):
            record: Mapping[str, Any] = {
                "step": step, "prompt": group.prompt.text, "completion": sample.text, "tokens": len(sample.ids),
                "finish_reason": sample.finish_reason,
                **{f"rewards/{f.name}": values[index] for f, values in zip(functions, group.rewards, strict=True)},
                "advantage": next(number), **{name: values[index] for name, values in group.extras.items()},
            }  # fmt: skip
            yield json.dumps(record, ensure_ascii=False, default=str)


def advantages_of(
    config: TrainConfig, loss: str, generation: RewardedGeneration, weights: Sequence[float], kl: Tensor
) -> Tensor:
    """Computes the advantages, fp32 [C]. weights are those of the reward functions. RLOO subtracts kl [C], times beta,
    from the rewards' sum."""
    if loss == "rloo":
        totals = weighted_totals(generation.rewards, weights)
        return rloo_advantages(totals - (config.beta or 0.0) * kl, config.generations)
    return group_advantages(
        generation.rewards, config.generations, reward_weights=weights, scale_rewards=config.scale_rewards or "group",
        multi_objective_aggregation=config.reward_aggregation,
    )  # fmt: skip


def kept_completions(config: TrainConfig, generation: RewardedGeneration, weights: Sequence[float]) -> Tensor:
    """Tells which completions updates read, bool [C]."""
    rewards = generation.rewards
    kept = torch.ones(len(rewards), dtype=torch.bool)
    if not config.keep_zero_spread:
        summed = config.reward_aggregation == "sum_then_normalize"
        compared = weighted_totals(rewards, weights) if summed else rewards
        kept = has_spread(compared, config.generations).repeat_interleave(config.generations)
    if config.mask_truncated:
        kept &= torch.tensor([sample.finish_reason == "stop" for sample in generation.samples])
    return kept


class GenerationWatch:
    """Looks at the metrics of each generation for rewards that do not differ, and says each thing once.

    keeps_all says whether groups without spread are trained on as well.
    """

    def __init__(self, keeps_all: bool) -> None:
        self.keeps_all = keeps_all
        self.useless = 0  # generations in a row
        self.absent: dict[str, str] = {}
        self.said: set[str] = set()

    def look(self, generation: RewardedGeneration, functions: Sequence[RewardFunction]) -> None:
        """Notes the functions that have given no completion of the generation a reward."""
        for function, values in zip(functions, generation.rewards.T, strict=True):
            if values.isnan().all():
                self.absent[f"absent {function.name}"] = (
                    f"--reward {function.name}: is None for all {len(values)} completions of a generation, which adds "
                    "nothing to their rewards: return numbers, or check the columns that it reads"
                )

    def refuse_useless(self, metrics: Mapping[str, float]) -> None:
        """Raises InputError where no group of many generations in a row could teach anything."""
        self.useless = self.useless + 1 if metrics["frac_reward_zero_std"] == 1 else 0
        if self.useless == USELESS_GENERATIONS and not self.keeps_all:
            raise InputError(
                f"{USELESS_GENERATIONS} generations in a row had no prompt whose completions got different rewards "
                f"(mean reward {metrics['reward']:.3g}): nothing can be learned. Begin with a model that solves some "
                "of the prompts, raise --temperature or --generations, or use a reward with partial credit"
            )

    def warnings(self, values: Mapping[str, float]) -> list[str]:
        """What there is to say after a step with these metrics."""
        found = dict(self.absent)
        if values.get("frac_reward_zero_std", 0) > MUCH_ZERO_SPREAD:
            found["spread"] = (
                f"{values['frac_reward_zero_std']:.0%} of the prompts got equal rewards for all completions, and teach "
                "nothing: watch frac_reward_zero_std"
            )
        if values.get("completions/clipped_ratio", 0) == 1:
            found["length"] = (
                "every completion reached --max-completion-length: raise it, or name a text that ends one by --stop"
            )
        new = {name: line for name, line in found.items() if name not in self.said}
        self.said |= new.keys()
        return list(new.values())
