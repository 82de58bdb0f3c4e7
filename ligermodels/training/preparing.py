"""What a run is before it allocates any memory: its settings, its model on the meta device, its data, its plan.

Everything that can be wrong with a run is refused here, as far as it is known by then. Each function returns a frozen
record that the next one reads: `choose` -> Start, `read_data` -> Opened, `fit_memory` -> MemoryFit, `prepare` -> Run.
"""

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import CheckpointError
from ligermodels.hub import adapter_folder, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.data import Data
from ligermodels.training.data.rows.run_rows import split_global_batch
from ligermodels.training.objectives import Objective, make_objective
from ligermodels.training.optimizers import build_optimizer
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.parallel import float8, fsdp
from ligermodels.training.parallel.activation_checkpointing import (
    MemoryEstimator,
    checkpointing_of,
    must_reshard_after_forward,
    replicates_quantised,
    usable_memory,
)
from ligermodels.training.parallel.context_parallel import refuse_unfit_length, refuse_unfit_model, share_rows
from ligermodels.training.parallel.expert_parallel import refuse_unfit_experts
from ligermodels.training.planning.contradictions import (
    refuse_contradictions,
    refuse_unfit_offload,
    refuse_unfit_optimizer_in_backward,
    refuse_unused_profile,
    refuse_unused_rounding,
)
from ligermodels.training.planning.defaults import TORCH_DTYPES, completed, parameter_precision, precision, with_choices
from ligermodels.training.planning.image_load import ImageLoad, image_load
from ligermodels.training.planning.model import build_model, part_scales, refuse_parts_without_images, take_special_ids
from ligermodels.training.planning.placement import Placement, Search, as_choices, choose_placement, find_device
from ligermodels.training.planning.plan import DataSummary, Plan, StateBytes, make_plan, memory_needs, state_sizes
from ligermodels.training.reporting.loggers import check_logger_packages
from ligermodels.training.run.publishing import check_hub_access
from ligermodels.training.run.resuming import refuse_finished, refuse_other_settings
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.training.settings.settings import with_base_of_adapter
from ligermodels.units import memory_size
from ligermodels.weights.files import open_checkpoint
from ligermodels.weights.loading import most_common_dtype
from ligermodels.weights.module import quantised_bytes


@dataclass(frozen=True)
class Start:
    """What is known of a run without its data.

    config has the choices that need no data; chosen has a line for each of them. world has the ranks that share rows.
    pretrained is the folder of the weights to start from, adapter that of the adapter to continue; None for none. The
    model is on the meta device.
    """

    config: TrainConfig
    chosen: Sequence[str]
    world: World
    pretrained: Path | None
    adapter: Path | None
    model: CausalLM
    objective: Objective


@dataclass(frozen=True)
class Opened:
    """What is known of a run once its data are open.

    config has all settings but those of the placement; chosen has a line for each that was not given and depends on the
    data. images are what the images of the data add to a step.
    """

    config: RunConfig
    chosen: Sequence[str]
    images: ImageLoad


@dataclass(frozen=True)
class MemoryFit:
    """How a run fits into memory.

    config has the settings of the placement; chosen has a line for each of them that was not given. placement has as
    much checkpointing as the memory demands that is free now. replicate_quantised and reshard_after_forward are
    arguments of `fsdp.shard`. estimate is the plan of the memory with all of these, memory its result.
    """

    config: RunConfig
    chosen: Sequence[str]
    placement: Placement
    replicate_quantised: bool
    reshard_after_forward: bool
    estimate: MemoryEstimator
    memory: TrainingMemory


@dataclass(frozen=True)
class Run:
    """A run before it allocates any memory. Its objective holds the data.

    The fields that it shares with `Start` and `MemoryFit` mean the same here.
    """

    config: RunConfig
    world: World
    pretrained: Path | None
    adapter: Path | None
    model: CausalLM
    objective: Objective
    fit: MemoryFit
    plan: Plan

    @property
    def estimate(self) -> MemoryEstimator:
        return self.fit.estimate

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return TORCH_DTYPES[self.config.dtype]

    def shard(self, model: CausalLM) -> None:
        """Shards the model over the ranks, in place."""
        fsdp.shard(
            model, self.world, self.dtype, dp_replicate=self.config.dp_replicate,
            expert_parallel=self.config.expert_parallel, replicate_quantised=self.fit.replicate_quantised,
            reshard_after_forward=self.fit.reshard_after_forward,
        )  # fmt: skip


def plan(config: TrainConfig, for_gpu: str | None = None, *, runs_code: bool = True) -> Plan:
    """What a run of these settings would do and need: parameters, memory, tokens, steps. It writes nothing.

    for_gpu: the GPUs to plan for, such as "24GB" or "h100,4"; None for the devices of this machine.
    runs_code: whether files of rewards are run, which finds their errors.
    Raises InputError for settings that contradict each other, data that cannot be read, a model that does not exist.
    """
    world = distributed.start() if for_gpu is None else distributed.planned_world(for_gpu)
    return prepare(config, world, runs_code=runs_code).plan


def prepare(config: TrainConfig, world: World, *, runs_code: bool = True) -> Run:
    """The run of these settings, before it allocates any memory. runs_code: as that of `plan`."""
    start = choose(config, world)
    if runs_code:
        start.objective.run_code()
    opened = read_data(start)
    fit = fit_memory(start, opened)
    blocks, kept_tensors = fit.placement.checkpointing
    start.model.checkpoint_activations(blocks, kept_tensors, fit.config.sequence_length)
    if fit.memory.offloads_every:
        start.model.offload_inputs(blocks, fit.memory.offloads_every)
    return Run(
        config=fit.config, world=start.world, pretrained=start.pretrained, adapter=start.adapter, model=start.model,
        objective=start.objective, fit=fit, plan=plan_of(start, opened, fit),
    )  # fmt: skip


def choose(given: TrainConfig, world: World) -> Start:
    """Chooses what needs no data: the precision, the objective, the model. Raises InputError for settings that
    contradict each other or do not fit the model."""
    named = with_base_of_adapter(given)
    refuse_contradictions(named)
    sharing = share_rows(world, named)
    config, chosen = with_choices(named, precision(named, sharing))
    objective = make_objective(config, sharing)
    check_logger_packages(config.log_to)
    if config.float8 and world.planned_for is None:
        (float8.import_torchao if config.float8_by_torchao else float8.check_float8_support)(world.device)
    refuse_other_settings(named)
    check_hub_access(config, sharing)
    pretrained = None if config.has_new_weights else resolve(str(config.model), revision=config.revision)
    stored = partial(dtype_of_checkpoint, pretrained)
    config, of_parameters = with_choices(config, parameter_precision(config, sharing, stored))
    refuse_unused_rounding(config)
    # Whether fp32 products use tf32 is set in torch, for the process.
    torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
    adapter = adapter_folder(config.adapter) if config.adapter else None
    model = build_model(config, pretrained, adapter)
    refuse_unfit_model(model, sharing.context)
    refuse_unfit_experts(model, config, sharing)
    return Start(config, [*chosen, *of_parameters], sharing, pretrained, adapter, model, objective)


def dtype_of_checkpoint(pretrained: Path | None) -> torch.dtype | None:
    """The dtype of most weights of a checkpoint; None for new weights, and for unreadable ones, which are told of when
    they are loaded, after faults of the settings and of the data."""
    if pretrained is not None:
        with suppress(CheckpointError):
            return most_common_dtype(open_checkpoint(pretrained).tensors.values())
    return None


def read_data(start: Start) -> Opened:
    """Opens the data, and chooses the settings that depend on them. Raises InputError for data that do not fit."""
    objective, model = start.objective, start.model
    objective.open(start.pretrained, model, start.adapter)
    if objective.data.new_tokenizer:
        take_special_ids(model)
    chosen_config, chosen = with_choices(start.config, objective.choices(model.config.hidden_size))
    config = completed(chosen_config)
    if objective.takes_rows:
        refuse_unfit_length(config)
    objective.complete(config)
    refuse_unused_profile(config)
    refuse_finished(config)
    images = image_load(model, objective.data)
    refuse_parts_without_images(model, config, images.tokens)
    return Opened(config, chosen, images)


def fit_memory(start: Start, opened: Opened) -> MemoryFit:
    """Chooses the placement of a run. Raises InputError for settings that cannot be."""
    given, model, world = opened.config, start.model, start.world
    search, device = placement_search(start, opened), find_device(given, model, world)
    placement = choose_placement(search, device)
    config, chosen = with_choices(given, as_choices(placement, search.plain(), device))
    assert isinstance(config, RunConfig)
    refuse_unfit_optimizer_in_backward(config, world.size, search.micro_batches(placement.micro_batch_size))

    needs, usable = search.estimate_of(placement), usable_memory(world)
    checkpointing = checkpointing_of(model, given.activation_checkpointing, needs, usable)
    replicates = replicates_quantised(usable, needs, checkpointing)
    reshards = must_reshard_after_forward(usable, needs, checkpointing, replicate_quantised=replicates)
    estimate = partial(
        needs, kept_tensors=checkpointing.kept_tensors, replicate_quantised=replicates, keep_unsharded=not reshards
    )
    memory = estimate(checkpointed_blocks=checkpointing.blocks)
    refuse_unfit_offload(config, world, memory, checkpointing.blocks)
    fitted = replace(placement, checkpointing=checkpointing)
    return MemoryFit(config, chosen, fitted, replicates, reshards, estimate, memory)


def placement_search(start: Start, opened: Opened) -> Search:
    """What the placements of a run are compared for."""
    config, model, world, objective = opened.config, start.model, start.world, start.objective
    beside, dtype = objective.bytes_beside(model), TORCH_DTYPES[config.dtype]

    @functools.cache
    def states(**moments: Any) -> StateBytes:
        return state_sizes(make_optimizer(replace(config, **moments), model))

    def needs(changed: RunConfig) -> MemoryEstimator:
        moments = states(optimizer=changed.optimizer, optimizer_state_dtype=changed.optimizer_state_dtype)
        further = objective.micro_batches, opened.images.most_patches, objective.head_op
        return memory_needs(model, moments, changed, world, dtype, beside, *further)

    sizes = micro_batch_sizes(config, objective, world)
    return Search(config, model, world, sizes, objective.micro_batches, needs)


def micro_batch_sizes(config: RunConfig, objective: Objective, world: World) -> list[int]:
    """The sizes that divide a rank's share of a step, the largest first; the given one alone. Raises InputError if
    ranks cannot share the global batch equally."""
    if not objective.takes_rows:
        return [1]
    share = split_global_batch(config.units, config.micro_batch_size, world)[1]
    return [share] if config.micro_batch_size else [size for size in range(share, 0, -1) if share % size == 0]


def make_optimizer(config: RunConfig, model: CausalLM) -> AdamW:
    """Builds the optimizer of a run. The model may be on the meta device."""
    states = None if config.optimizer_state_dtype is None else TORCH_DTYPES[config.optimizer_state_dtype]
    return build_optimizer(
        model, config.optimizer, state_dtype=states, weight_decay=config.weight_decay,
        part_scales=part_scales(config), param_rounding=config.param_rounding, seed=config.seed,
    )  # fmt: skip


def plan_of(start: Start, opened: Opened, fit: MemoryFit) -> Plan:
    """The plan of a run that fits into memory."""
    objective, data = start.objective, start.objective.data
    summary = DataSummary(
        data.description, rows=len(data.training), passes=data.training.mixture.rows_per_epoch,
        validation_rows=len(data.validation), lengths=data.lengths if isinstance(data, Data) else None,
        images=opened.images,
    )  # fmt: skip
    return make_plan(
        start.model, fit.config, start.world, data=summary, micro_batch_size=fit.placement.micro_batch_size,
        checkpointing=fit.placement.checkpointing, memory=fit.memory, tokens_per_step=objective.tokens_per_step,
        chosen=[*start.chosen, *opened.chosen, *fit.chosen, *places_of_quantised(start, fit)],
        phases=objective.phases(start.model, fit.memory), facts=objective.facts(), advice=objective.advice(),
    )  # fmt: skip


def places_of_quantised(start: Start, fit: MemoryFit) -> list[str]:
    """A line of the plan: where the bytes of quantised weights are, of a model that is sharded."""
    size = sum(parameter.nbytes for parameter in quantised_bytes(start.model))
    shards = fsdp.dp_shard_size(start.world, fit.config.dp_replicate)
    if not size or shards == 1:
        return []
    where = "whole on every rank, never gathered" if fit.replicate_quantised else f"sharded over {shards} ranks"
    return [f"quantised weights, {memory_size(size)}: {where}"]
