"""Supervised training: the cross-entropy of the next token, over the supervised tokens of a step."""

from pathlib import Path
from typing import Any

import torch

from ligermodels import distributed
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data import Data, count_supervised, open_data, refuse_short_epoch
from ligermodels.training.data.reader import image_options
from ligermodels.training.data.rows.run_rows import Batch
from ligermodels.training.objectives.evaluation import evaluate
from ligermodels.training.objectives.objective import Objective, Share, Work
from ligermodels.training.planning.defaults import Choice, image_choices, schedule
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import RunConfig


class SFT(Objective):
    """The loss is the sum over all supervised tokens of the step, divided by their number, in nats.

    `counts` of a step: supervised tokens, and all that are no padding.
    """

    takes_rows = True
    is_capturable = True
    data: Data
    config: RunConfig

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        positions = model.config.max_position_embeddings
        inputs = image_options(model, folder)
        self.data = open_data(self.config, folder, model.config.embedded_tokens, positions, adapter, *inputs)

    def choices(self, hidden_size: int) -> dict[str, Choice]:
        chosen = schedule(self.config, self.data, hidden_size, self.world, self.passes_beside)
        return chosen | image_choices(self.config, self.data, hidden_size)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        refuse_short_epoch(self.data, config.units)

    @property
    def tokens_per_step(self) -> int:
        return self.config.units * self.config.sequence_length

    @property
    def trains_chats(self) -> bool:
        return self.data.validation.completion_only

    def work(self, model: CausalLM, progress: Progress) -> Work:
        rows = self.config.units
        batches = self.data.training.micro_batches(progress.rows, rows, self.run.micro_batch_size, self.world)
        own = [torch.stack([count_supervised(batch), batch.row_lengths.sum()]) for batch in batches]
        counts = distributed.total(torch.stack(own).sum(0))
        counts = counts // self.world.context  # ranks that share rows count the same ones
        return Work(batches, counts, units=rows, tokens=self.tokens_per_step)

    def arguments(self, batch: Batch, work: Work) -> dict[str, Any]:
        """The arguments of `forward` for one of the step's micro-batches."""
        supervised, tokens = work.counts.unbind()
        share = batch.row_lengths.sum() / (tokens * self.world.context)  # ranks that share rows add their losses
        return batch.arguments() | {"num_items_in_batch": supervised.clamp_min(1), "balance_share": share}

    def loss(self, model: CausalLM, batch: Batch, work: Work) -> Share:
        return Share(model(**self.arguments(batch, work), context=self.run.context).loss)

    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        # Ranks that share experts must take the same number of steps, which nothing makes sure of in generation.
        generates = self.config.expert_parallel == 1
        rows, context = self.run.micro_batch_size, self.run.context
        return evaluate(model, self.data, rows, self.world, stop, context, generates)
