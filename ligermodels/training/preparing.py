"""What a run is before it allocates any memory: its settings, its model on the meta device, its data, its plan.

Everything that can be wrong with a run is refused here, as far as it is known by then. Must not know the loop.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ligermodels import distributed
from ligermodels.adapters.lora_targets import add_lora
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import adapter_folder, add_lora_of_adapter, create, quantise_on_meta, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.data import Data
from ligermodels.training.data.embedded.new_tokenizer import GENERATION_CONFIG, SPECIAL_IDS
from ligermodels.training.data.rows.batches import split_global_batch
from ligermodels.training.objectives import Objective, make_objective
from ligermodels.training.optimizers import build_optimizer
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.parallel import fsdp
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
from ligermodels.training.planning.defaults import TORCH_DTYPES, completed, precision, with_choices
from ligermodels.training.planning.image_load import image_load
from ligermodels.training.planning.model_parts import part_scales, refuse_parts_without_images, train_parts
from ligermodels.training.planning.placement import Placement, Search, as_choices, choose_placement, find_device
from ligermodels.training.planning.plan import Plan, StateBytes, make_plan, memory_needs, state_sizes
from ligermodels.training.reporting.loggers import check_logger_packages
from ligermodels.training.run.publishing import check_hub_access
from ligermodels.training.run.resuming import refuse_finished, refuse_other_settings
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.training.settings.continuing import with_base_of_adapter
from ligermodels.units import memory_size
from ligermodels.weights.module import quantised_bytes


class Run(NamedTuple):
    """A run before it allocates any memory: its model on the meta device, its objective with the data, its plan."""

    config: RunConfig
    world: World  # with the ranks that share rows
    pretrained: Path | None  # the folder of the weights to start from
    adapter: Path | None  # the folder of the adapter to continue
    model: CausalLM
    objective: Objective
    build: Callable[[CausalLM], AdamW]  # the optimizer
    estimate: MemoryEstimator
    shard: Callable[[CausalLM], None]  # over the ranks, in place
    plan: Plan


def plan(config: TrainConfig) -> Plan:
    """What a run of these settings would do and need: parameters, memory, tokens, steps. It writes nothing.

    Raises InputError for settings that contradict each other, data that cannot be read, a model that does not exist.
    """
    return prepare(config, distributed.start()).plan


def prepare(config: TrainConfig, world: World) -> Run:
    """The run of these settings, before it allocates any memory."""
    config = with_base_of_adapter(config)
    refuse_contradictions(config)
    world = share_rows(world, config)
    objective = make_objective(config, world)
    check_logger_packages(config.log_to)
    refuse_other_settings(config)
    check_hub_access(config, world)

    # The model, without its weights yet. Frozen weights are stored in the compute dtype.
    pretrained = None if config.has_new_weights else resolve(str(config.model), revision=config.revision)
    config, chosen = with_choices(config, precision(config, world))
    refuse_unused_rounding(config)
    objective.config = config  # with the choices that are made without the data
    # Whether fp32 products use tf32 is set in torch, for the process.
    torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
    compute_dtype, param_dtype = TORCH_DTYPES[str(config.dtype)], TORCH_DTYPES[str(config.param_dtype)]
    size = config.size if config.has_new_weights else None
    dtype = compute_dtype if config.with_lora else param_dtype
    scores = config.objective == "reward"
    model = create(pretrained or str(config.model), size=size, dtype=dtype, device="meta", reward_model=scores)
    if isinstance(model, RewardModel) and not scores:
        raise InputError(f"--model {config.model}: is a reward model, which --objective reward trains")
    if pretrained is not None:
        quantise_base(model, pretrained, config)
    adapter = adapter_folder(config.adapter) if config.adapter else None
    if adapter:
        add_lora_of_adapter(model, adapter, param_dtype)
    elif config.lora_rank:
        add_lora(
            model, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout,
            targets=config.lora_targets, modules_to_save=modules_to_save(config), dtype=param_dtype,
        )  # fmt: skip

    train_parts(model, config, compute_dtype)
    if config.low_memory_loss:
        model.lm_head.low_memory_loss = True
    refuse_unfit_model(model, world.context)
    refuse_unfit_experts(model, config, world)

    # The data, and the settings that depend on it.
    objective.open(pretrained, model, adapter)
    data = objective.data
    if data.new_tokenizer:
        take_special_ids(model)
    config, more = with_choices(config, objective.choices(model.config.hidden_size))
    config = completed(config)
    refuse_unfit_length(config)
    objective.complete(config)
    refuse_unused_profile(config)
    refuse_finished(config)

    images = image_load(model, data)
    refuse_parts_without_images(model, config, images.tokens)
    fit = fit_memory(config, model, objective, world, compute_dtype, images.most_patches)
    config, objective.micro_batch_size = fit.config, fit.placement.micro_batch_size
    checkpointed_blocks, kept_tensors = fit.placement.checkpointing
    model.checkpoint_activations(checkpointed_blocks, kept_tensors, config.sequence_length)
    if fit.memory.offloads_every:
        model.offload_inputs(checkpointed_blocks, fit.memory.offloads_every)
    places = places_of_quantised(model, fsdp.dp_shard_size(world, config.dp_replicate), fit.replicate_quantised)
    made = make_plan(
        model, config, world, description=data.description, rows=len(data.training),
        passes=data.training.mixture.rows_per_epoch, validation_rows=len(data.validation),
        lengths=data.lengths if isinstance(data, Data) else None, micro_batch_size=objective.micro_batch_size,
        tokens_per_step=objective.tokens_per_step, chosen=[*chosen, *more, *fit.chosen, *places], dtype=compute_dtype,
        checkpointed_blocks=checkpointed_blocks, kept_tensors=kept_tensors, memory=fit.memory,
        phases=objective.phases(fit.memory), images=images, facts=objective.facts(), advice=objective.advice(),
    )  # fmt: skip
    shard = partial(
        fsdp.shard, world=world, dtype=compute_dtype, dp_replicate=config.dp_replicate,
        expert_parallel=config.expert_parallel, replicate_quantised=fit.replicate_quantised,
        reshard_after_forward=fit.reshard_after_forward,
    )  # fmt: skip
    build = optimizer_builder(config, model)
    return Run(config, world, pretrained, adapter, model, objective, build, fit.estimate, shard, made)


@dataclass(frozen=True)
class MemoryFit:
    """How a run fits into memory.

    config: with the settings of the placement. chosen: a line for each of them that was not given. placement: with as
    much checkpointing as the memory demands that is free now. replicate_quantised, reshard_after_forward: as those of
    `fsdp.shard`. estimate: of the memory, with all of these. memory: by that estimate.
    """

    config: RunConfig
    chosen: Sequence[str]
    placement: Placement
    replicate_quantised: bool
    reshard_after_forward: bool
    estimate: MemoryEstimator
    memory: TrainingMemory


def fit_memory(
    config: RunConfig, model: CausalLM, objective: Objective, world: World, dtype: torch.dtype, row_patches: int
) -> MemoryFit:
    """Chooses the placement of a run. model: on the meta device. dtype: of computation. row_patches: the most of the
    images of a row. Raises InputError for settings that cannot be."""
    beside = objective.bytes_beside(model)

    @functools.cache
    def states(**moments: Any) -> StateBytes:
        return state_sizes(optimizer_builder(replace(config, **moments), model)(model))

    def needs(changed: RunConfig) -> MemoryEstimator:
        moments = states(optimizer=changed.optimizer, optimizer_state_dtype=changed.optimizer_state_dtype)
        further = objective.micro_batches, row_patches, objective.head_op
        return memory_needs(model, moments, changed, world, dtype, beside, *further)

    search = Search(config, model, world, micro_batch_sizes(config, objective, world), objective.micro_batches, needs)
    device = find_device(config, model, world)
    placement = choose_placement(search, device)
    placed, chosen = with_choices(config, as_choices(placement, search.plain(), device))
    assert isinstance(placed, RunConfig)
    micro_batches = objective.micro_batches(placement.micro_batch_size)
    refuse_unfit_optimizer_in_backward(placed, world.size, micro_batches)

    estimate = search.estimate_of(placement)
    mode, usable = config.activation_checkpointing, usable_memory(world)
    blocks, kept_tensors = checkpointing = checkpointing_of(model, mode, estimate, usable)
    estimate = partial(estimate, kept_tensors=kept_tensors)
    replicated = replicates_quantised(usable, estimate, blocks)
    estimate = partial(estimate, replicate_quantised=replicated)
    reshards = must_reshard_after_forward(usable, estimate, blocks)
    estimate = partial(estimate, keep_unsharded=not reshards)
    memory = estimate(checkpointed_blocks=blocks)
    refuse_unfit_offload(placed, world.size, memory, blocks)
    placement = replace(placement, checkpointing=checkpointing)
    return MemoryFit(placed, chosen, placement, replicated, reshards, estimate, memory)


def micro_batch_sizes(config: RunConfig, objective: Objective, world: World) -> list[int]:
    """The sizes that divide a rank's share of a step, the largest first; the given one alone. Raises InputError if
    ranks cannot share the global batch equally."""
    if not objective.takes_rows:
        return [1]
    share = split_global_batch(config.units, config.micro_batch_size, world)[1]
    return [share] if config.micro_batch_size else [size for size in range(share, 0, -1) if share % size == 0]


def optimizer_builder(config: RunConfig, model: CausalLM) -> Callable[[CausalLM], AdamW]:
    """Builds the optimizer of a run. model: it, perhaps on the meta device."""
    states = None if config.optimizer_state_dtype is None else TORCH_DTYPES[config.optimizer_state_dtype]
    return partial(
        build_optimizer,
        name=config.optimizer,
        state_dtype=states,
        weight_decay=config.weight_decay,
        part_scales=part_scales(model, config),
        param_rounding=config.param_rounding,
        seed=config.seed,
    )


def quantise_base(model: CausalLM, folder: Path, config: TrainConfig) -> None:
    """Quantises the frozen linears, as --quantize says or as the checkpoint stores them. Raises InputError."""
    if quantise_on_meta(model, folder, config.quantize) and not config.with_lora:
        raise InputError(
            f"--model {config.model}: its weights are stored in 4 bits, which cannot be trained in full: add "
            "--lora-rank 16, or name the original model"
        )


def places_of_quantised(model: CausalLM, shards: int, replicated: bool) -> list[str]:
    """A line of the plan: where the bytes of quantised weights are, of a model that is sharded."""
    size = sum(parameter.nbytes for parameter in quantised_bytes(model))
    if not size or shards == 1:
        return []
    where = "whole on every rank, never gathered" if replicated else f"sharded over {shards} ranks"
    return [f"quantised weights, {memory_size(size)}: {where}"]


def modules_to_save(config: TrainConfig) -> tuple[str, ...]:
    """Those given; of a reward model its head too, which is new, or would not follow the rest."""
    return config.modules_to_save if config.objective != "reward" else tuple({*config.modules_to_save, "score"})


def take_special_ids(model: CausalLM) -> None:
    """Gives the model the special tokens of a new tokenizer, in place of those that its configuration has."""
    model.generation_config = GENERATION_CONFIG
    model.config.raw = {**model.config.raw, **SPECIAL_IDS}
    model.config.pad_token_id = None
    for module in model.model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
