"""Taught: what objectives with a model as the teacher share, and the values that distillation reports."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError, suggest
from ligermodels.kernels.losses.linear_divergence import DivergenceOutput
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses.divergences import KINDS
from ligermodels.training.objectives.distillation.teachers import TeacherModel, common_vocabulary
from ligermodels.training.objectives.objective import Objective
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.settings.config import RunConfig, TrainConfig

DEFAULT_JSD = 0.5


class Taught(Objective):
    """An objective with a model as the teacher. Metrics: `divergence` and `entropy` per token, of the student at the
    temperature; `nll` with a ce_weight.

    vocab: the number of classes that are compared; None for all.
    """

    teacher: TeacherModel
    vocab: int | None

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.divergence, self.b = parse_divergence(config.divergence)
        if config.teacher is None:
            raise InputError("--teacher is missing: a Hub id or a folder of the model to learn from")
        if self.divergence == "cosine" and config.temperature is not None:
            raise InputError("--temperature has no effect on --divergence cosine, which is of logits: leave it out")

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        super().open(folder, model, adapter)  # type: ignore[safe-super]  # that of the data's objective
        if self.data.processor is not None:
            raise InputError(
                f"--data {self.data.names}: has images, which a teacher does not see; take text for --objective distill"
            )
        self.teacher = self.make_teacher()
        names = self.config.title, str(self.config.teacher)
        self.vocab = common_vocabulary(model, self.teacher.model, names, (self.data.tokenizer, self.teacher.tokenizer))

    def make_teacher(self) -> TeacherModel:
        return TeacherModel(str(self.config.teacher))

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        self.teacher.model.to(torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)

    @property
    def load(self) -> tuple[int, int]:
        """(tokens of a pass of the teacher, ranks that share its weights)."""
        return self.config.sequence_length or 0, dp_shard_size(self.world, self.config.dp_replicate)

    def bytes_beside(self, model: CausalLM) -> int:
        return self.teacher.memory(*self.load)

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        self.teacher.prepare(self.world, self.config.dp_replicate)
        if self.vocab is not None:
            say(f"distill: the {self.vocab:,} tokens of the tokenizer are compared; the rest of each head is padding")

    @property
    def temperature(self) -> float:
        return self.config.temperature or 1.0

    def options(self, ce_weight: float) -> dict[str, Any]:
        """Of `linear_divergence`, but the teacher's states."""
        compared = {"kind": self.divergence, "b": self.b, "temperature": self.temperature, "vocab": self.vocab}
        return compared | self.teacher.options | {"ce_weight": ce_weight}

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        return values_per_token(sums)


def divergence_sums(found: DivergenceOutput, tokens: Tensor) -> dict[str, Tensor]:
    """Sums over the supervised tokens, and their number."""
    sums = {"tokens": tokens, "divergence": found.divergence.sum(), "entropy": found.entropy.sum()}
    return sums if found.cross_entropy is None else sums | {"nll": found.cross_entropy.sum()}


def values_per_token(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: value / max(1.0, sums["tokens"]) for name, value in sums.items() if name != "tokens"}


def parse_divergence(text: str) -> tuple[str, float]:
    """ "jsd:0.5" -> ("jsd", 0.5): a kind of `losses.divergence`, and the b of jsd. Raises InputError."""
    kind, colon, given = text.partition(":")
    if kind not in KINDS:
        raise InputError(f"--divergence {text}: is not a divergence{suggest(kind, KINDS)}")
    if colon and kind != "jsd":
        raise InputError(f"--divergence {text}: only jsd has a number behind a colon; write {kind}")
    try:
        b = float(given) if colon else DEFAULT_JSD
    except ValueError:
        b = -1.0
    if not 0 < b < 1:
        remedy = {"0": "forward_kl", "1": "reverse_kl"}.get(given, "jsd:0.5")
        raise InputError(f"--divergence {text}: b of jsd is above 0 and below 1; did you mean {remedy}?")
    return kind, b
