"""GroupObjective: what the objectives on groups share: their data door, the size of a step, their validation.

A group is a prompt with its completions: a pair, or a judged completion.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ligermodels import distributed
from ligermodels.aliases import flag_of
from ligermodels.errors import InputError
from ligermodels.kernels.losses.linear_logprobs import LogProbs
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses import segment_sums
from ligermodels.memory.blocks import HeadOp
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data.preferences import GroupOptions, PreferenceBatch, PreferenceData, Step, open_preferences
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.reader import image_options
from ligermodels.training.objectives.evaluation import start_stop_check
from ligermodels.training.objectives.objective import Objective, Share, StepTotals, Work
from ligermodels.training.planning.defaults import TRAINING_PASSES, Choice, image_limits, validation_interval
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import UNIT_SETTINGS, RunConfig
from ligermodels.units import counted

MOST_UNITS = 64
NEW_WEIGHTS_RATE = 0.128  # divided by the hidden size: 1e-3 at width 128
LONGER_WARMUP = 0.1
MEASURED = ("entropy", "greedy")  # beside log-probabilities; greedy: whether the label is the likeliest token


class PolicyOutput(NamedTuple):
    """loss: of the row_loss; None without one. found: log-probabilities, entropy and more of the supervised tokens, [M]
    each. balance: the weighted balance loss of routers; None without them."""

    loss: Tensor | None
    found: LogProbs
    balance: Tensor | None = None


class GroupObjective(Objective):
    """An objective on groups. A step takes `config.units` of them, packed into rows; a micro-batch is one row.

    kind: of the groups. learning_rate: for pretrained weights, all of them trained; ten times that for LoRA.
    min_steps_per_epoch: small data has smaller batches.
    """

    kind: GroupKind
    learning_rate: ClassVar[float]
    min_steps_per_epoch: ClassVar[int] = 40
    data: PreferenceData
    config: RunConfig

    @property
    def unit(self) -> str:
        return UNIT_SETTINGS[self.config.objective].removesuffix("s")

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        config = self.config
        if config.lora_dropout and config.share_prompts and self.kind == "pairs":
            raise InputError(
                f"--lora-dropout {config.lora_dropout:g}: draws one mask for all completions of a shared prompt: add "
                "--share-prompts off, or leave it out"
            )
        options = GroupOptions(
            kind=self.kind, max_length=config.max_length, max_prompt_length=config.max_prompt_length,
            too_long=config.too_long, row_length=config.sequence_length,
            share_prompts=config.share_prompts and model.shares_keys,
        )  # fmt: skip
        inputs = image_options(model, folder)
        self.data = open_preferences(config, options, folder, model.config.embedded_tokens, adapter, *inputs)

    def choices(self, hidden_size: int) -> dict[str, Choice]:
        config, groups = self.config, len(self.data.training)
        few = max(2, groups // self.min_steps_per_epoch)
        units = MOST_UNITS if few >= MOST_UNITS else 2 ** (few.bit_length() - 1)
        reason = f"at least {self.min_steps_per_epoch} steps an epoch" if units < MOST_UNITS else ""
        taken = getattr(config, UNIT_SETTINGS[config.objective]) or units
        epochs = config.epochs or 1.0
        steps = math.ceil(epochs * groups / taken)
        length = config.steps or steps
        warmup = min(math.ceil(LONGER_WARMUP * length), length - 1)
        rate, trained = self.learning_rate, "full fine-tuning"
        if config.has_new_weights:
            rate, trained = NEW_WEIGHTS_RATE / hidden_size, "new weights"
        elif config.with_lora:
            rate, trained = 10 * rate, "LoRA"
        return {
            "sequence_length": Choice(2 * config.max_length),
            UNIT_SETTINGS[config.objective]: Choice(units, reason),
            "steps": Choice(steps, f"{epochs:g} epoch{'' if epochs == 1 else 's'}"),
            "learning_rate": Choice(rate, f"{config.objective}, {trained}"),
            "warmup": Choice(warmup, f"{LONGER_WARMUP:.0%} of the steps"),
            "eval_every": validation_interval(
                config,
                length,
                taken * (TRAINING_PASSES + self.passes_beside),
                len(self.data.validation) * (1 + self.passes_beside),
            ),
            "activation_checkpointing": Choice("auto", "as much as memory demands"),
            **image_limits(self.data),
        }

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        if len(self.data.training) < config.units:
            raise InputError(
                f"--data {self.data.names}: has {counted(len(self.data.training), self.unit)} for training, but a step "
                f"takes {config.units}; lower {flag_of(UNIT_SETTINGS[config.objective])}, or give more data"
            )

    @property
    def head_op(self) -> HeadOp:
        return HeadOp("linear_logprobs")

    @property
    def shares_prompts(self) -> bool:
        """Whether a row has one copy of a prompt that several completions have."""
        return self.kind == "pairs" and self.data.training.groups.options.share_prompts

    @property
    def tokens_per_step(self) -> int:
        groups = self.data.training.groups
        return round(sum(part.tokens for part in groups.parts) / len(groups) * self.config.units)

    def work(self, model: CausalLM, progress: Progress) -> Work:
        taken = progress.rows, self.config.units, self.world
        step = self.data.training.step(*taken)
        return self.assemble(model, step, lambda: self.data.training.mismatched(*taken))

    def assemble(self, model: CausalLM, step: Step, mismatched: Callable[[], Step]) -> Work:
        """The work of a step. mismatched: returns the same prompts with other examples' completions, for KTO."""
        own = torch.stack([self.count(batch) for batch in step.batches]).sum(0)
        counts = (distributed.total(own) // self.world.context).clamp_min(1).float()
        saved = {"tokens_saved": 1 - step.tokens / step.tokens_unshared} if self.shares_prompts else {}
        return Work(step.batches, counts, units=step.units, tokens=step.tokens, metrics=saved)

    @abstractmethod
    def count(self, batch: PreferenceBatch) -> Tensor:
        """The units of a row, and other numbers that the loss divides by: int64, on the batch's device."""

    def policy(self, model: CausalLM, batch: PreferenceBatch, extras: Sequence[str] = (), **loss: Any) -> PolicyOutput:
        """The policy's pass over a row. extras are those of `ops.linear_logprobs`, beside what is always measured; loss
        has the row_loss of `ops.linear_logprobs_loss` and its borders, where the loss is one of units."""
        more = ["mean_logit"] if self.config.mean_logits else []
        options, context = {"extras": (*MEASURED, *more, *extras)}, self.run.context
        options |= loss if context is None else {}
        output = model(**batch.model_inputs, row_lengths=batch.row_lengths, logprobs=options, context=context)
        found, of_units = output.logprobs.map(lambda x: batch.of_all_rows(x, context)), output.loss
        if context is not None and loss:
            of_units = loss["row_loss"](found.logprobs, None, slice(0, len(found.logprobs)))
        found = found.map(lambda x: x[: batch.supervised])
        if output.aux_loss is None:
            return PolicyOutput(of_units, found)
        return PolicyOutput(of_units, found, getattr(model.config, "router_aux_loss_coef", 0.0) * output.aux_loss)

    def validation_steps(self, model: CausalLM) -> Iterator[Step]:
        """The held-out groups, once."""
        return self.data.validation.steps(self.config.units, self.world)

    @torch.no_grad()
    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        """Computes the loss on the held-out groups: each step's divided by its counts, and their mean by units."""
        model.eval()
        found = StepTotals(self.world.device)
        stop_requested = start_stop_check(stop, self.world)
        groups = self.data.validation.groups
        first = 0
        for part in self.validation_steps(model):
            if stop_requested():
                model.train()
                return None
            stop_requested = start_stop_check(stop, self.world)
            numbers, random = range(first, first + part.units), np.random.default_rng(first)
            work = self.assemble(model, part, partial(groups.mismatched, numbers, self.world, random))
            first += part.units
            for batch in work.batches:
                share = self.loss(model, batch, work)
                found.add(share._replace(loss=share.loss * (part.units / len(groups))))
        model.train()
        (loss,), sums, maxima = found.named(found.over_ranks(()).tolist(), 0)
        return Validation(loss, self.metrics(sums, maxima, step), per_token=False)


def token_sums(found: LogProbs) -> dict[str, Tensor]:
    """What is measured of the supervised tokens of a row, summed, and their number as "supervised"."""
    assert found.entropy is not None and found.greedy is not None  # `policy` asked for them
    return {
        "supervised": found.entropy.new_full((), found.logprobs.numel()),
        "entropy": found.entropy.sum(),
        "mean_token_accuracy": found.greedy.sum(),
    }


def logit_sums(found: LogProbs, completions: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """Mean logits summed over the tokens of each side, and the number of its tokens; empty where they are not there.

    completions: int32 [S + 1], offsets; chosen: bool [S], which of them are chosen or good.
    """
    if found.mean_logit is None:
        return {}
    lengths, sums = completions.diff(), segment_sums(found.mean_logit, completions)
    sides = {"chosen": chosen, "rejected": ~chosen}
    values = {f"logits/{side}": sums.masked_fill(~members, 0).sum() for side, members in sides.items()}
    return values | {f"logit_tokens/{side}": lengths.masked_fill(~members, 0).sum() for side, members in sides.items()}


def mean_logits(sums: Mapping[str, float]) -> dict[str, float]:
    """`logits/chosen` and `logits/rejected` per token, from `logit_sums` over a step, of the sides that have tokens."""
    counts = {side: sums.get(f"logit_tokens/{side}", 0) for side in ("chosen", "rejected")}
    return {f"logits/{side}": sums[f"logits/{side}"] / count for side, count in counts.items() if count}


def balance_share(balance: Tensor | None, batch: PreferenceBatch, work: Work) -> Tensor | float:
    """The micro-batch's part of the routers' balance loss: its share of the step's tokens, which routers see."""
    return 0.0 if balance is None else balance * (batch.tokens / work.tokens)


def one_of(ranks: int, share: Share) -> Share:
    """What each of the ranks adds that have all computed this share."""
    return Share(share.loss / ranks, {name: value / ranks for name, value in share.sums.items()}, share.maxima)


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None: the others have the defaults of the function that they are for."""
    return {name: value for name, value in options.items() if value is not None}
