"""Distillation: the divergence of the student from a teacher, or from what it has left in the data, over the supervised
tokens of a step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError, suggest
from ligermodels.kernels.losses.linear_divergence import DivergenceOutput
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses.divergences import KINDS, TOP_K_KINDS
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data.preferences import Group, GroupOptions, PreferenceBatch, Step, open_preferences
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.preferences.layout import GroupPiece
from ligermodels.training.data.preferences.steps import Groups
from ligermodels.training.data.rows.run_rows import Batch, count_supervised
from ligermodels.training.objectives.distillation.teachers import StoredTeacher, TeacherModel, common_vocabulary
from ligermodels.training.objectives.evaluation import answers_and_sample, start_stop_check
from ligermodels.training.objectives.grpo.sampling import (
    Sampler,
    SamplingPlan,
    completion_limit,
    engine_size,
    most_prompt_tokens,
)
from ligermodels.training.objectives.objective import Objective, RunSetup, Share, Work
from ligermodels.training.objectives.preference.groups import GroupObjective
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.planning.defaults import TORCH_DTYPES, Choice
from ligermodels.training.reporting.flops import forward_flops
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import RunConfig, TrainConfig

DEFAULT_JSD = 0.5
DEFAULT_LENGTH = 2048  # of a packed row of documents


class TeacherObjective(Objective):
    """An objective with a model as the teacher.

    Its metrics are `divergence` and `entropy` per token, of the student at the temperature, and `nll` with a ce_weight.
    vocab is the number of classes that are compared; None for all. teacher_passes is what a pass of the teacher costs,
    in passes of the student.
    """

    teacher: TeacherModel
    teacher_passes: float
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
        self.teacher_passes = forward_flops(self.teacher.model) / forward_flops(model)
        names = self.config.title, str(self.config.teacher)
        self.vocab = common_vocabulary(model, self.teacher.model, names, (self.data.tokenizer, self.teacher.tokenizer))

    def make_teacher(self) -> TeacherModel:
        return TeacherModel(str(self.config.teacher))

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        self.teacher.model.to(torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)

    @property
    def passes_beside(self) -> float:
        return super().passes_beside + (0 if isinstance(self.teacher, StoredTeacher) else self.teacher_passes)

    @property
    def load(self) -> tuple[int, int]:
        """The tokens of a pass of the teacher, and the ranks that share its weights."""
        return self.config.sequence_length or 0, dp_shard_size(self.world, self.config.dp_replicate)

    def bytes_beside(self, model: CausalLM) -> int:
        return self.teacher.memory(*self.load)

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        super().prepare(model, run)
        self.teacher.prepare(self.world, self.config.dp_replicate, run.micro_batch_size)
        if self.vocab is not None:
            compared = f"the {self.vocab:,} tokens of the tokenizer are compared"
            run.say(f"distill: {compared}; the rest of each head is padding")

    @property
    def temperature(self) -> float:
        return self.config.temperature or 1.0

    def options(self, ce_weight: float) -> dict[str, Any]:
        """The options of `linear_divergence`, but the teacher's states."""
        compared = {"kind": self.divergence, "b": self.b, "temperature": self.temperature, "vocab": self.vocab}
        return compared | self.teacher.options | {"ce_weight": ce_weight}

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        return values_per_token(sums)


class Distill(TeacherObjective, SFT):
    """The loss is Σ (divergence + ce_weight · cross-entropy) over the supervised tokens of a step / their number."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        if config.max_completion_length is not None:
            raise InputError("--max-completion-length goes with --on-policy, which is missing")

    def make_teacher(self) -> TeacherModel:
        if self.config.teacher_states is None:
            return super().make_teacher()
        return StoredTeacher(str(self.config.teacher), self.config.teacher_states)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        if isinstance(self.teacher, StoredTeacher):
            self.teacher.complete(config, self.data)

    def phases(self, model: CausalLM, train: TrainingMemory) -> dict[str, int]:
        """The phase "teacher" writes its states, beside the student's weights."""
        writing = self.teacher.writing_memory(*self.load) if isinstance(self.teacher, StoredTeacher) else 0
        return ({"teacher": train.weights + writing} if writing else {}) | {"train": train.peak}

    def facts(self) -> dict[str, str]:
        return {"teacher": self.teacher.line} if isinstance(self.teacher, StoredTeacher) else {}

    def loss(self, model: CausalLM, batch: Batch, work: Work) -> Share:
        with self.teacher.read(batch) as teacher:
            options = {"teacher": teacher} | self.options(self.config.ce_weight)
            found = model(**self.arguments(batch, work), divergence=options)
        return Share(found.loss, divergence_sums(found.divergence, count_supervised(batch)))

    @torch.no_grad()
    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        """Computes the loss, the divergence and the cross-entropy (`nll`) per token, answers and a sample."""
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
        """Computes `divergence_sums` of the validation rows of all ranks, with the cross-entropy; None if a stop is
        requested."""
        totals: dict[str, Tensor] = {}
        stop_requested = start_stop_check(stop, self.world)
        for batch in self.data.validation.batches(self.run.micro_batch_size, self.world):
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


class GroupDistill(GroupObjective):
    """What distillation on prompts with completions shares, whether these are of the data or sampled by the student.

    Each is one document; a step takes `batch_size` of them.
    """

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
        """How groups are read. length is that of a row, if no document is longer; the model was made for so many
        positions."""
        return GroupOptions(kind=self.kind, max_length=length, row_length=length)

    def choices(self, hidden_size: int) -> dict[str, Choice]:
        made = super().choices(hidden_size)
        length = self.data.training.groups.options.tokens_per_row
        return made | {"sequence_length": made["sequence_length"]._replace(value=length)}

    def count(self, batch: PreferenceBatch) -> Tensor:
        return batch.rows.new_full((1,), batch.supervised)

    def arguments(self, batch: PreferenceBatch, work: Work) -> dict[str, Any]:
        """The arguments of `forward` for one of the step's micro-batches."""
        lengths, share = batch.row_lengths, batch.tokens / work.tokens
        shares = {"row_lengths": lengths, "num_items_in_batch": work.counts[0], "balance_share": share}
        return batch.model_inputs | shares


def divergence_sums(found: DivergenceOutput, tokens: Tensor) -> dict[str, Tensor]:
    """Adds up the values of the supervised tokens, and counts these."""
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


class OnPolicyDistill(TeacherObjective, GroupDistill):
    """On-policy distillation (GKD): the loss is Σ divergence over the tokens of a step's completions / their number.

    A fraction of the steps, `--on-policy`, samples a completion of each of its prompts from the weights as they are;
    the others take the completions of the data. Every completion serves one update, and depends on the weights, the
    seed and the place in the data alone, so that a checkpoint needs none of them. arXiv 2306.13649; no gradient goes
    through the sampling, as there.

    Where every step samples, the data are prompts, and validation is on greedy completions of those held out; else they
    are those of supervised training, and validation is on their completions.
    """

    sampler: Sampler

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        if config.ce_weight:
            raise InputError("--ce-weight has no effect with --on-policy: the student's own samples are no labels")
        if config.teacher_states is not None:
            raise InputError(
                "--teacher-states has no effect with --on-policy: samples are not known before; leave it out"
            )
        self.kind = "prompts" if config.on_policy == 1 else "distillation"

    def group_options(self, length: int, positions: int) -> GroupOptions:
        if self.kind == "distillation":
            return replace(super().group_options(length, positions), needs_prompts=True)
        return GroupOptions(kind=self.kind, max_length=most_prompt_tokens(self.config, positions), row_length=length)

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        super().open(folder, model, adapter)
        self.longest_prompt = max(self.data.training.groups.longest_prompt, self.data.validation.groups.longest_prompt)
        self.limit = completion_limit(self.config, model.config.max_position_embeddings, self.data)

    def choices(self, hidden_size: int) -> dict[str, Choice]:
        return super().choices(hidden_size) | self.limit

    def plan(self, temperature: float) -> SamplingPlan:
        return SamplingPlan(1, temperature, self.config.longest_completion, seed=self.config.seed)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        assert self.data.tokenizer is not None  # records are texts
        own = -(-config.units // self.world.size)
        size = engine_size(self.longest_prompt, own, self.plan(self.temperature))
        self.sampler = Sampler(self.data.tokenizer, size, self.vocab)  # the teacher must know every token

    @property
    def tokens_per_step(self) -> int:
        """An upper bound: every completion of a prompt has its full length."""
        sampled = self.config.longest_completion if self.kind == "prompts" else 0
        return super().tokens_per_step + self.config.units * sampled

    def bytes_beside(self, model: CausalLM) -> int:
        dtype = TORCH_DTYPES[str(self.config.dtype)]
        return super().bytes_beside(model) + self.sampler.memory(model, dtype).kept

    def phases(self, model: CausalLM, train: TrainingMemory) -> dict[str, int]:
        generation = self.sampler.memory(model, TORCH_DTYPES[str(self.config.dtype)]).generation
        resident = train.weights + train.optimizer_states + train.beside
        gathered = train.gathered if self.world.size > 1 else 0
        return {"generate": resident + gathered + generation, "train": train.peak}

    # -- a step

    def samples_in(self, step: int) -> bool:
        """Whether the step behind `step` completed ones samples. Such steps are spread evenly."""
        fraction = self.config.on_policy
        return math.floor((step + 1) * fraction) > math.floor(step * fraction)

    def work(self, model: CausalLM, progress: Progress) -> Work:
        if not self.samples_in(progress.step):
            return super().work(model, progress)
        groups = self.data.training.groups
        numbers = self.data.training.numbers(progress.rows, self.config.units)
        step = self.sampled(model, groups, numbers, self.plan(self.temperature), progress.rows)
        lengths = step.supervised / step.units
        return self.assemble(model, step, lambda: step)._replace(metrics={"completions/mean_length": lengths})

    def sampled(self, model: CausalLM, groups: Groups, numbers: Sequence[int], plan: SamplingPlan, first: int) -> Step:
        """The step with the prompts of these groups and completions that the student samples."""
        prompts = groups.dealt_prompts(numbers, self.world)
        samples = self.sampler.sample(model, prompts, plan, first)
        mine = [(prompt, ids[0].ids) for prompt, ids in zip(prompts, samples, strict=True)]
        found = [pair for part in distributed.gather_objects(mine) for pair in part]
        pieces = [
            GroupPiece(Group(prompt.ids, (np.array(ids),), (None,)), prompt.unit)
            for prompt, ids in sorted(found, key=lambda pair: pair[0].unit)
        ]
        step = groups.rows(pieces, [math.nan] * len(pieces), None, self.world)
        return step._replace(batches=[batch.to(self.world.device) for batch in step.batches])

    def loss(self, model: CausalLM, batch: PreferenceBatch, work: Work) -> Share:
        with self.teacher.read(batch) as teacher:
            options = {"teacher": teacher} | self.options(0.0)
            found = model(**self.arguments(batch, work), divergence=options, skip_logits=True)
        return Share(found.loss, divergence_sums(found.divergence, work.counts.new_full((), batch.supervised)))

    def validation_steps(self, model: CausalLM) -> Iterator[Step]:
        if self.kind == "distillation":
            yield from super().validation_steps(model)
            return
        groups = self.data.validation.groups
        for first in range(0, len(groups), self.config.units):
            numbers = range(first, min(first + self.config.units, len(groups)))
            yield self.sampled(model, groups, numbers, self.plan(0.0), first)
