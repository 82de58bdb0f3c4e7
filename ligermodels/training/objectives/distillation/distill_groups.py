"""GroupDistill: distillation on prompts with completions, one document each. A step takes `batch_size` of them."""

from pathlib import Path

from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data.preferences import GroupOptions, PreferenceBatch, open_preferences
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.objectives.preference.groups import GroupObjective
from ligermodels.training.planning.defaults import Choice
from ligermodels.training.settings.config import TrainConfig

DEFAULT_LENGTH = 2048


class GroupDistill(GroupObjective):
    """What distillation on documents of the data shares, and on those that a student samples."""

    kind: GroupKind = "distillation"
    learning_rate = 2e-5

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        if config.micro_batch_size is not None:
            raise InputError("--micro-batch-size has no effect here: a micro-batch is one packed row; leave it out")

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        length = self.config.sequence_length or min(DEFAULT_LENGTH, model.config.max_position_embeddings)
        options = self.group_options(length, model.config.max_position_embeddings)
        self.data = open_preferences(self.config, options, folder, model.config.vocab_size, adapter)

    def group_options(self, length: int, positions: int) -> GroupOptions:
        """length: tokens of a row, if no document is longer. positions: for which the model was made."""
        return GroupOptions(kind=self.kind, max_length=length, row_length=length)

    def choices(self, hidden_size: int) -> dict[str, Choice]:
        made = super().choices(hidden_size)
        length = self.data.training.groups.options.tokens_per_row
        return made | {"sequence_length": made["sequence_length"]._replace(value=length)}

    def count(self, batch: PreferenceBatch) -> Tensor:
        return batch.rows.new_full((1,), batch.supervised)
