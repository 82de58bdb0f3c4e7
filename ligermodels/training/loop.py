"""The training loop: one run, to be read from top to bottom.

    from ligermodels.training import TrainConfig, train
    result = train(TrainConfig(model="qwen2", steps=200))

A step takes `batch_size` sequences, however many ranks and micro-batches share them: neither changes what is learned,
nor in which order.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import adapter_folder, add_lora_of_adapter, create, export, export_adapter, load_adapter, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import initialize_lora
from ligermodels.layers.lora_targets import add_lora
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.config import RunConfig, TrainConfig
from ligermodels.training.data import Data, count_supervised, open_data, refuse_short_epoch
from ligermodels.training.data.new_tokenizer import GENERATION_CONFIG, SPECIAL_IDS
from ligermodels.training.data.run_tokenizer import generation_config, write_tokenizer
from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.schedules import learning_rate
from ligermodels.training.reporting.curves import draw_curves
from ligermodels.training.reporting.evaluation import evaluate
from ligermodels.training.reporting.flops import peak_flops
from ligermodels.training.reporting.loggers import check_logger_packages, open_loggers
from ligermodels.training.reporting.metrics import METRICS_FILE, Metrics, is_validated
from ligermodels.training.reporting.profile import StepProfiler
from ligermodels.training.runs.advice import advice, resume_command
from ligermodels.training.runs.continuing import with_base_of_adapter
from ligermodels.training.runs.contradictions import refuse_contradictions, refuse_unused_profile
from ligermodels.training.runs.defaults import completed, precision, schedule, with_choices
from ligermodels.training.runs.folder import ADAPTER, CHECKPOINTS, MODEL, default_folder, locked, new_folder
from ligermodels.training.runs.plan import Plan, make_plan, memory_needs
from ligermodels.training.runs.rescue import rescued
from ligermodels.training.runs.resuming import refuse_other_data, refuse_resuming
from ligermodels.training.runs.settings import SETTINGS_FILE, settings, write_settings
from ligermodels.training.runs.stopping import signals
from ligermodels.training.scaling import float8, fsdp
from ligermodels.training.scaling.activation_checkpointing import (
    MemoryEstimator,
    apply_activation_checkpointing,
    must_reshard_after_forward,
)
from ligermodels.training.scaling.compilation import compile_blocks
from ligermodels.training.scaling.host_reads import read_async
from ligermodels.training.scaling.micro_batches import micro_batch_size_of
from ligermodels.training.scaling.out_of_memory import out_of_memory_advice
from ligermodels.weights.loading import load_weights
from ligermodels.weights.writing import failure

TORCH_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainResult:
    """model: as it was trained; under FSDP2 its parameters are DTensors. metrics: the records of metrics.jsonl, in
    order, such as {"step": 1, "loss": 6.9, …}. folder: of the run. exported: the model's or the adapter's folder in it;
    None where nothing was exported.
    """

    model: CausalLM
    metrics: list[dict[str, Any]]
    folder: Path
    exported: Path | None


class Run(NamedTuple):
    """A run before it allocates any memory: its model on the meta device, its data, its plan."""

    config: RunConfig
    pretrained: Path | None  # the folder of the weights to start from
    model: CausalLM
    data: Data
    build: Callable[[CausalLM], AdamW]  # the optimizer
    estimate: MemoryEstimator
    reshard_after_forward: bool
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
    check_logger_packages(config.log_to)
    refuse_resuming(config)

    # The model, without its weights yet. Frozen weights are stored in the compute dtype.
    pretrained = None if config.has_new_weights else resolve(str(config.model), revision=config.revision)
    config, chosen = with_choices(config, precision(config, world))
    # Whether fp32 products use tf32 is set in torch, for the process.
    torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
    compute_dtype, param_dtype = TORCH_DTYPES[str(config.dtype)], TORCH_DTYPES[str(config.param_dtype)]
    size = config.size if config.has_new_weights else None
    dtype = compute_dtype if config.with_lora else param_dtype
    model = create(pretrained or str(config.model), size=size, dtype=dtype, device="meta")
    if config.adapter:
        add_lora_of_adapter(model, adapter_folder(config.adapter), param_dtype)
    elif config.lora_rank:
        add_lora(
            model, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout,
            targets=config.lora_targets, modules_to_save=config.modules_to_save, dtype=param_dtype,
        )  # fmt: skip

    # The data, and the settings that depend on it.
    data = open_data(config, pretrained, model.config.vocab_size, model.config.max_position_embeddings)
    if data.new_tokenizer:
        take_special_ids(model)
    config, more = with_choices(config, schedule(config, data, model.config.hidden_size, world))
    config = completed(config)
    refuse_short_epoch(data, config.batch_size)
    refuse_unused_profile(config)

    # The memory that a step needs. Activation checkpointing takes as many blocks as memory demands.
    states = None if config.optimizer_state_dtype is None else TORCH_DTYPES[config.optimizer_state_dtype]
    build = partial(build_optimizer, name=config.optimizer, state_dtype=states, weight_decay=config.weight_decay)
    estimate = memory_needs(model, build(model), config, world, compute_dtype)
    micro_batch_size = micro_batch_size_of(config, world, len(model.model.layers), estimate)
    estimate = partial(estimate, batch_size=micro_batch_size)
    checkpointed_blocks = apply_activation_checkpointing(model, config.activation_checkpointing, world, estimate)
    reshard_after_forward = must_reshard_after_forward(world, estimate, checkpointed_blocks)
    estimate = partial(estimate, keep_unsharded=not reshard_after_forward)
    made = make_plan(
        model, config, world, description=data.description, rows=len(data.training),
        passes=data.training.mixture.rows_per_epoch, validation_rows=len(data.validation),
        lengths=data.lengths, micro_batch_size=micro_batch_size, chosen=[*chosen, *more],
        checkpointed_blocks=checkpointed_blocks, memory=estimate(checkpointed_blocks=checkpointed_blocks),
    )  # fmt: skip
    return Run(config, pretrained, model, data, build, estimate, reshard_after_forward, made)


def train(config: TrainConfig) -> TrainResult:
    """Makes a run: trains, validates, saves checkpoints, exports. Under torchrun every rank calls.

    Everything is written into the run's folder (docs/training.md). SIGTERM, SIGINT and SIGHUP end it after its
    current step, with a checkpoint. A process group that it starts stays: `ligermodels.distributed.stop()` leaves it.
    Raises InputError for what cannot be run, before memory is allocated where that is known by then.
    """
    world = distributed.start()
    config, pretrained, model, data, build, estimate, reshard_after_forward, run = prepare(config, world)
    compute_dtype = TORCH_DTYPES[config.dtype]
    has_template = data.tokenizer is not None and bool(data.tokenizer.templates)
    chats = config.chat_template is not None or (has_template and data.validation.completion_only)

    with ExitStack() as held:
        output = config.resume or new_folder(config.output, default_folder(config.title))
        held.enter_context(locked(output))
        if config.resume is None:  # from here on --resume works; a resumed run writes its settings when it is restored
            error = failure(write_settings, config, output / SETTINGS_FILE) if world.is_first else None
            distributed.raise_on_all(error)
        held.enter_context(
            out_of_memory_advice(config, estimate, run.micro_batch_size, run.checkpointed_blocks, run.blocks)
        )
        stop = held.enter_context(signals())
        described = settings(config) | {"data_fingerprint": data.training.fingerprint}
        checkpoints = held.enter_context(Checkpoints(output / CHECKPOINTS, config.keep_checkpoints, described))
        refuse_other_data(config, checkpoints.saved_settings(), data.training.fingerprint)

        # Shard, then give each rank's share of the weights its memory and its values.
        if config.float8:
            float8.convert(model, world.device)
        if config.compile:
            compile_blocks(model)
        fsdp.shard(
            model, world, compute_dtype, dp_replicate=config.dp_replicate, reshard_after_forward=reshard_after_forward
        )
        model.to_empty(device=world.device)
        if pretrained is None:
            model.initialize(config.seed)
        else:
            load_weights(model, pretrained)
            initialize_lora(model, torch.Generator(world.device).manual_seed(config.seed))
            model.source = pretrained
            if config.adapter:
                load_adapter(model, config.adapter)
        model.generation_config = generation_config(
            data.tokenizer, model.generation_config, model.config.raw, chats=chats
        )
        torch.manual_seed(config.seed + world.rank)  # dropout
        model.train()

        optimizer = build(model)
        say = print if world.is_first else lambda line: None
        progress = (checkpoints.restore(model, optimizer, say) if config.resume else None) or Progress()
        before = progress.seconds

        peak_of_one = peak_flops(world.device, config.dtype)
        loggers = open_loggers(config.log_to, output, settings(config), progress.step) if world.is_first else []
        if config.resume and world.is_first:
            write_settings(config, output / SETTINGS_FILE)
        metrics = held.enter_context(
            Metrics(
                output, steps=config.steps, done=progress.step, tokens_per_step=run.tokens_per_step,
                device=world.device, flops_per_token=run.flops, peak=peak_of_one and peak_of_one * world.size,
                loggers=loggers, enabled=world.is_first,
            )
        )  # fmt: skip
        traced = config.profile if world.is_first else None
        profiler = held.enter_context(StepProfiler(traced, output / "trace.json.gz", world.device, metrics.say))
        for line in (run.line, *run.notes, *(f"warning: {warning}" for warning in run.warnings)):
            metrics.say(line)
        if config.resume:
            begins = f"resumes after step {progress.step}" if progress.step else "has no checkpoint, starts again"
            metrics.say(f"{output}: {begins}")
        validate = partial(evaluate, model, data, run.micro_batch_size, world, metrics, stop)
        validated = distributed.from_first(world.is_first and is_validated(output / METRICS_FILE, progress.step))
        expected = validation_due(config, progress.step) if progress.step else pretrained is not None

        resume = resume_command(output, world)
        # A validation that a signal interrupts stops the run; it is made up for on resume, before the next step.
        stopped = expected and not validated and not validate(progress.step)
        exported = None
        while progress.step < config.steps and not stopped:
            # The loss is the sum over all supervised tokens of the step, on all ranks, divided by their number.
            profiler.begin(progress.step + 1)
            batches = data.training.micro_batches(progress.rows, config.batch_size, run.micro_batch_size, world)
            count = distributed.total(torch.stack([count_supervised(batch) for batch in batches]).sum())
            loss = torch.zeros((), device=world.device)
            for number, batch in enumerate(batches, 1):
                fsdp.set_gradient_all_reduce(model, enabled=number == len(batches))
                share = model(**batch._asdict(), num_items_in_batch=count.clamp_min(1)).loss
                share.backward()
                loss += share.detach()

            # A step that is not finite updates nothing. The host reads the numbers while the update runs.
            notes = [torch.full_like(loss, float(note)) for note in (stop.requested, checkpoints.failed)]
            totals, norm = distributed.total(torch.stack([loss, *notes])), fsdp.gradient_norm(model)
            read = read_async(torch.cat([totals, norm[None]]))
            rate = learning_rate(config.schedule, progress.step, config.steps, config.warmup, config.learning_rate)
            set_learning_rate(optimizer, rate)
            clip_and_step(optimizer, totals[0], norm, config.max_grad_norm)
            optimizer.zero_grad()
            loss_value, told_to_stop, failed, norm_value = read()
            finite = math.isfinite(loss_value) and math.isfinite(norm_value)
            metrics.step(progress.step + 1, loss_value, norm_value, rate, skipped=not finite)
            profiler.end(last=progress.step + 1 == config.steps)
            if not finite:
                places = data.training.places(progress.rows, config.batch_size)
                metrics.write({"step": progress.step + 1, "not_finite": places})
                if config.on_nan == "stop":
                    if progress.step:
                        checkpoints.save(model, optimizer, progress)  # as they were before this step
                        checkpoints.wait()
                    raise InputError(
                        f"step {progress.step + 1}: loss {loss_value}, gradient norm {norm_value}: stopped before the "
                        f"update; {output / METRICS_FILE} names the step's documents; lower --learning-rate, or "
                        f"continue without such steps: {resume} --on-nan skip"
                    )

            progress = replace(
                progress, step=progress.step + 1, rows=progress.rows + config.batch_size,
                tokens=progress.tokens + run.tokens_per_step, seconds=before + metrics.seconds,
            )  # fmt: skip
            stopped = told_to_stop > 0 and progress.step < config.steps
            if failed:
                checkpoints.wait()  # which raises
            last_without_export = config.no_export and progress.step == config.steps
            due = config.checkpoint_every and (last_without_export or progress.step % config.checkpoint_every == 0)
            if stopped or due:
                checkpoints.save(model, optimizer, progress)  # written in the background, during validation
                metrics.resume_clock()
            if not stopped and validation_due(config, progress.step) and not validate(progress.step):
                stopped = True
                checkpoints.save(model, optimizer, progress)

        checkpoints.wait()
        metrics.finish()
        if stopped:
            metrics.say(f"Stopped after step {progress.step}. To resume:")
            metrics.say(f"  {resume}")
        elif not config.no_export:
            with rescued(checkpoints, model, optimizer, progress, resume):
                exported = export_run(model, data, config, output, compute_dtype)
            for line in advice(config, world, exported, chats=chats):
                metrics.say(line)
        if world.is_first:
            draw_curves(metrics.records(), output / "curves.png", str(output), metrics.say)
        distributed.wait_for_all()
        records = distributed.from_first(metrics.records())
    return TrainResult(model, records, output, exported)


def take_special_ids(model: CausalLM) -> None:
    """Gives the model the special tokens of a new tokenizer, in place of those that its configuration has."""
    model.generation_config = GENERATION_CONFIG
    model.config.raw = {**model.config.raw, **SPECIAL_IDS}
    model.config.pad_token_id = model.model.embed_tokens.padding_idx = None


def validation_due(config: RunConfig, step: int) -> bool:
    """Whether a run validates after this step, which counts from 1."""
    return step % config.eval_every == 0 or step == config.steps


def export_run(model: CausalLM, data: Data, config: TrainConfig, output: Path, dtype: torch.dtype) -> Path:
    """Writes the model, or the LoRA adapter alone, into the run's folder; returns where."""
    template = data.tokenizer.chat_template if data.tokenizer and config.chat_template else None
    adapter = adapter_folder(config.adapter) if config.adapter else None
    also = partial(
        write_tokenizer, source=adapter if adapter and has_tokenizer(adapter) else None, new=data.new_tokenizer,
        template=template, generation_config=model.generation_config,
    )  # fmt: skip
    if config.exports_adapter:
        export_adapter(model, output / ADAPTER, also=also)
        return output / ADAPTER
    export(model, output / MODEL, dtype=dtype, also=also)
    return output / MODEL
