"""Distillation: the divergence of the student from a teacher, over the supervised tokens of a step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError, suggest
from ligermodels.kernels.linear_divergence import DivergenceOutput
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses.divergences import KINDS
from ligermodels.training.config import RunConfig, TrainConfig
from ligermodels.training.data.batches import Batch, count_supervised
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.objectives.teachers import TeacherModel, common_vocabulary
from ligermodels.training.reporting.evaluation import correct_answers, greedy_sample, start_stop_check
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.runs.stopping import Stop
from ligermodels.training.scaling.fsdp import dp_shard_size

DEFAULT_JSD = 0.5


class Distill(SFT):
    """The loss is Σ (divergence + ce_weight · cross-entropy) over the supervised tokens of a step / their number.

    Metrics: `divergence` and `entropy` per token, of the student at the temperature; `nll` with a ce_weight.
    """

    teacher: TeacherModel
    vocab: int | None

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.kind, self.b = parse_divergence(config.divergence)
        if config.teacher is None:
            raise InputError("--teacher is missing: a Hub id or a folder of the model to learn from")
        if self.kind == "cosine" and config.temperature is not None:
            raise InputError("--temperature has no effect on --divergence cosine, which is of logits: leave it out")

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        super().open(folder, model, adapter)
        self.teacher = TeacherModel(str(self.config.teacher))
        names = self.config.title, str(self.config.teacher)
        self.vocab = common_vocabulary(model, self.teacher.model, names, (self.data.tokenizer, self.teacher.tokenizer))

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        self.teacher.model.to(torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)

    def bytes_beside(self, model: CausalLM) -> int:
        return self.teacher.memory(self.config.sequence_length, dp_shard_size(self.world, self.config.dp_replicate))

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        self.teacher.prepare(self.world, self.config.dp_replicate)
        if self.vocab is not None:
            say(f"distill: the {self.vocab:,} tokens of the tokenizer are compared; the rest of each head is padding")

    def options(self, ce_weight: float) -> dict[str, Any]:
        """Of `linear_divergence`, but the teacher's states."""
        temperature = self.config.temperature or 1.0
        compared = {"kind": self.kind, "b": self.b, "temperature": temperature, "vocab": self.vocab}
        return compared | self.teacher.options | {"ce_weight": ce_weight}

    def loss(self, model: CausalLM, batch: Batch, work: Work) -> Share:
        with self.teacher.read(batch) as teacher:
            options = {"teacher": teacher} | self.options(self.config.ce_weight)
            found = model(**batch._asdict(), num_items_in_batch=work.counts.clamp_min(1), divergence=options)
        return Share(found.loss, divergence_sums(found.divergence, count_supervised(batch)))

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        return values_per_token(sums)

    @torch.no_grad()
    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        """The loss, the divergence and the cross-entropy (`nll`) per token, answers and a sample."""
        model.eval()
        sums = self.validation_sums(model, stop)
        found = None
        if sums is not None:
            with torch.compiler.set_stance("force_eager"):  # otherwise every prompt length would be compiled
                answers, sample = correct_answers(model, self.data), greedy_sample(model, self.data)
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
                found = model(**batch._asdict(), num_items_in_batch=1, divergence=options, skip_logits=True)
            sums = divergence_sums(found.divergence, count_supervised(batch))
            totals = {name: totals.get(name, 0) + value.double() for name, value in sums.items()}
        values = distributed.total(torch.stack(list(totals.values()))).tolist()
        return dict(zip(totals, values, strict=True))


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
