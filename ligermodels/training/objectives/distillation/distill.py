"""Distillation: the divergence of the student from a teacher, over the supervised tokens of a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.data.rows.batches import Batch, count_supervised
from ligermodels.training.objectives.distillation.stored_teacher import StoredTeacher
from ligermodels.training.objectives.distillation.taught import Taught, divergence_sums, values_per_token
from ligermodels.training.objectives.distillation.teachers import TeacherModel
from ligermodels.training.objectives.evaluation import answers_and_sample, start_stop_check
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import FIELDS, RunConfig, TrainConfig


class Distill(Taught, SFT):
    """The loss is Σ (divergence + ce_weight · cross-entropy) over the supervised tokens of a step / their number."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        if config.max_completion_length != FIELDS["max_completion_length"].default:
            raise InputError("--max-completion-length goes with --on-policy, which is missing")

    def make_teacher(self) -> TeacherModel:
        if self.config.teacher_states is None:
            return super().make_teacher()
        return StoredTeacher(str(self.config.teacher), self.config.teacher_states)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        if isinstance(self.teacher, StoredTeacher):
            self.teacher.complete(config, self.data)

    def phases(self, train: TrainingMemory) -> dict[str, int]:
        """teacher: beside the student's weights, while its states are written."""
        writing = self.teacher.writing_memory(*self.load) if isinstance(self.teacher, StoredTeacher) else 0
        return ({"teacher": train.weights + writing} if writing else {}) | {"train": train.peak}

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        if isinstance(self.teacher, StoredTeacher):
            self.teacher.micro_batch_size = self.micro_batch_size  # the same passes as those of a teacher in memory
        super().prepare(model, say)

    def facts(self) -> dict[str, str]:
        return {"teacher": self.teacher.line} if isinstance(self.teacher, StoredTeacher) else {}

    def loss(self, model: CausalLM, batch: Batch, work: Work) -> Share:
        with self.teacher.read(batch) as teacher:
            options = {"teacher": teacher} | self.options(self.config.ce_weight)
            found = model(**batch.arguments(), num_items_in_batch=work.counts.clamp_min(1), divergence=options)
        return Share(found.loss, divergence_sums(found.divergence, count_supervised(batch)))

    @torch.no_grad()
    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        """The loss, the divergence and the cross-entropy (`nll`) per token, answers and a sample."""
        model.eval()
        sums = self.validation_sums(model, stop)
        found = None
        if sums is not None:
            answers, sample = answers_and_sample(model, self.data)
            values = values_per_token(sums)
            loss = values["divergence"] + self.config.ce_weight * values["nll"]
            found = Validation(loss, values, per_token=False, answers=answers, sample=sample)
        model.train()
        return found

    def validation_sums(self, model: CausalLM, stop: Stop) -> dict[str, float] | None:
        """`divergence_sums` of the validation rows of all ranks, and the cross-entropy; None if a stop is requested."""
        totals: dict[str, Tensor] = {}
        stop_requested = start_stop_check(stop, self.world)
        for batch in self.data.validation.batches(self.micro_batch_size, self.world):
            if stop_requested():
                return None
            stop_requested = start_stop_check(stop, self.world)
            with self.teacher.read(batch) as teacher:
                options = {"teacher": teacher} | self.options(ce_weight=1.0)
                found = model(**batch.arguments(), num_items_in_batch=1, divergence=options, skip_logits=True)
            sums = divergence_sums(found.divergence, count_supervised(batch))
            totals = {name: totals.get(name, 0) + value.double() for name, value in sums.items()}
        values = distributed.total(torch.stack(list(totals.values()))).tolist()
        return dict(zip(totals, values, strict=True))
