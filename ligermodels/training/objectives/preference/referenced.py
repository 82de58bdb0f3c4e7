"""Referenced: what objectives with a reference share: which kind it is, and its part in a run and its checkpoints."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.distributed import World
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.objectives.preference.groups import GroupObjective
from ligermodels.training.objectives.preference.precomputed import PrecomputedReference
from ligermodels.training.objectives.preference.references import (
    Reference,
    default_reference,
    make_live_reference,
    parse_reference,
    refuse_base_that_is_trained,
)
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.settings.config import RunConfig, TrainConfig


class Referenced(GroupObjective):
    """An objective on groups with a reference.

    ld_alpha: weight of the tokens beyond the shorter side, in the reference's sums as in the policy's.
    """

    reference: Reference
    ld_alpha: float | None = None

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.spec = parse_reference(config.reference or self.default_reference())
        if self.spec.kind != "precomputed":
            make_live_reference(self.spec, config, world)

    def default_reference(self) -> str:
        return default_reference(self.config)

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        if self.spec.kind == "base":
            refuse_base_that_is_trained(model)
        super().open(folder, model, adapter)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        if self.spec.kind == "precomputed":
            self.reference = PrecomputedReference(config, self.world, self.data, self.ld_alpha)
        else:
            self.reference = make_live_reference(self.spec, config, self.world, self.data.tokenizer)

    def bytes_beside(self, model: CausalLM) -> int:
        return self.reference.bytes_beside(model, dp_shard_size(self.world, self.config.dp_replicate))

    def phases(self, train: TrainingMemory) -> Mapping[str, int]:
        first = {"precompute": train.forward_peak} if self.spec.kind == "precomputed" else {}
        return {**first, **super().phases(train)}

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        self.reference.prepare(model, say)

    def finish_step(self, model: CausalLM, step: int) -> None:
        self.reference.finish_step(model, step)

    def tensors(self) -> dict[str, Tensor]:
        return self.reference.tensors()
