"""Distillation from a teacher that is not there: the log-probabilities of its k likeliest tokens, in the data."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses.divergences import TOP_K_KINDS
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.objectives.distillation.distill import (
    GroupDistill,
    divergence_sums,
    parse_divergence,
    values_per_token,
)
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.settings.config import TrainConfig


class TopKDistill(GroupDistill):
    """Distillation from `teacher_ids` and `teacher_logprobs` of the records. All other tokens count as one class.

    A temperature must be the one at which the teacher's log-probabilities were computed.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.divergence, _ = parse_divergence(config.divergence)
        if self.divergence not in TOP_K_KINDS:
            raise InputError(
                f"--divergence {config.divergence} needs a whole distribution, and --teacher top-k has k tokens of it: "
                f"take {' or '.join(TOP_K_KINDS)}"
            )
        if config.teacher_states is not None:
            raise InputError("--teacher-states: --teacher top-k reads the data, and has no hidden states; leave it out")
        if config.on_policy:
            raise InputError(
                "--on-policy: --teacher top-k has nothing to say of completions that are not in the data; name a model"
            )

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        super().open(folder, model, adapter)
        groups = self.data.training.groups
        absent = next((part for part in groups.parts if part.store.teacher_ids is None), None)
        if absent is not None:
            raise InputError(
                f"{absent.store.place(0)}: has no teacher_ids and teacher_logprobs, which --teacher top-k reads; add "
                "them, or name a model to learn from"
            )

    def loss(self, model: CausalLM, batch: PreferenceBatch, work: Work) -> Share:
        options = {
            "teacher": teacher_of(batch), "kind": self.divergence, "temperature": self.config.temperature or 1.0,
            "ce_weight": self.config.ce_weight,
        }  # fmt: skip
        found = model(**self.arguments(batch, work), divergence=options, skip_logits=True)
        tokens = work.counts.new_full((), batch.supervised)
        return Share(found.loss, divergence_sums(found.divergence, tokens))

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        return values_per_token(sums)


def teacher_of(batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    """Returns (ids, logprobs), [N, k]. A row of padding, whose places are not supervised, gets one class."""
    if batch.teacher_ids is None or batch.teacher_logprobs is None:
        ids = torch.zeros_like(batch.rows)[:, None]
        return ids, torch.zeros_like(ids, dtype=torch.float32)
    return batch.teacher_ids, batch.teacher_logprobs
