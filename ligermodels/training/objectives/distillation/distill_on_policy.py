"""On-policy distillation (GKD): the divergence from a teacher on completions that the student samples.

A fraction of the steps, `--on-policy`, samples a completion of each of its prompts from the weights as they are; the
others take the completions of the data. Every completion serves one update, and depends on the weights, the seed and
the place in the data alone, so that a checkpoint needs none of them. Source: arXiv 2306.13649; no gradient goes through
the sampling, as there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data.preferences import Group, GroupOptions, PreferenceBatch, Step
from ligermodels.training.data.preferences.layout import GroupPiece
from ligermodels.training.data.preferences.steps import Groups
from ligermodels.training.objectives.distillation.distill import GroupDistill, TeacherObjective, divergence_sums
from ligermodels.training.objectives.grpo.sampling import (
    Sampler,
    SamplingPlan,
    completion_limit,
    engine_size,
    most_prompt_tokens,
)
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.planning.defaults import TORCH_DTYPES, Choice
from ligermodels.training.settings.config import RunConfig, TrainConfig


class OnPolicyDistill(TeacherObjective, GroupDistill):
    """The loss is Σ divergence over the tokens of a step's completions / their number.

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
