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
from ligermodels.hub import create, export, export_adapter, list_architectures, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import initialize_lora
from ligermodels.layers.lora_targets import add_lora
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.config import TrainConfig
from ligermodels.training.data import Data, count_supervised, open_data
from ligermodels.training.data.new_tokenizer import GENERATION_CONFIG, save_tokenizer
from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.schedules import default_learning_rate, learning_rate
from ligermodels.training.reporting.curves import draw_curves
from ligermodels.training.reporting.evaluation import evaluate
from ligermodels.training.reporting.flops import peak_flops
from ligermodels.training.reporting.loggers import check_logger_packages, open_loggers
from ligermodels.training.reporting.metrics import METRICS_FILE, Metrics
from ligermodels.training.reporting.profile import StepProfiler
from ligermodels.training.runs.advice import advice, resume_command
from ligermodels.training.runs.contradictions import refuse_contradictions
from ligermodels.training.runs.folder import ADAPTER, CHECKPOINTS, MODEL, default_folder, locked, new_folder, replacing
from ligermodels.training.runs.intervals import checkpoint_due, validation_due
from ligermodels.training.runs.plan import Plan, make_plan, memory_needs
from ligermodels.training.runs.publishing import check_hub_access, publish
from ligermodels.training.runs.rescue import rescued
from ligermodels.training.runs.resuming import refuse_finished, refuse_other_data, refuse_other_settings
from ligermodels.training.runs.settings import SETTINGS_FILE, settings, write_settings
from ligermodels.training.runs.stopping import signals
from ligermodels.training.runs.validations import Validations, validation_losses
from ligermodels.training.scaling import float8, fsdp
from ligermodels.training.scaling.activation_checkpointing import (
    MemoryEstimator,
    apply_activation_checkpointing,
    must_reshard_after_forward,
)
from ligermodels.training.scaling.compilation import compile_blocks
from ligermodels.training.scaling.host_reads import read_async
from ligermodels.training.scaling.out_of_memory import out_of_memory_advice
from ligermodels.weights.loading import load_weights
from ligermodels.weights.writing import failure

TORCH_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainResult:
    """model: as it was trained; under FSDP2 its parameters are DTensors. step: the step after which it had these
    weights: the last one, or that with the lowest validation loss (`best_checkpoint`). metrics: the records of
    metrics.jsonl, in order, such as {"step": 1, "loss": 6.9, …}. folder: of the run. exported: the model's or the
    adapter's folder in it; None where nothing was exported.
    """

    model: CausalLM
    step: int
    metrics: list[dict[str, Any]]
    folder: Path
    exported: Path | None


class Run(NamedTuple):
    """A run before it allocates any memory: its model on the meta device, its data, its plan."""

    config: TrainConfig
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
    refuse_contradictions(config)
    check_logger_packages(config.log_to)
    refuse_other_settings(config)
    check_hub_access(config, world)

    # The model, without its weights yet. Frozen weights are stored in the compute dtype.
    is_family = config.model in list_architectures()
    pretrained = None if is_family else resolve(str(config.model), revision=config.revision)
    config = with_param_dtype(config, world)
    compute_dtype, param_dtype = TORCH_DTYPES[config.dtype], TORCH_DTYPES[str(config.param_dtype)]
    size = config.size if is_family else None
    dtype = compute_dtype if config.lora_rank else param_dtype
    model = create(pretrained or str(config.model), size=size, dtype=dtype, device="meta")
    if config.lora_rank:
        add_lora(
            model, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout,
            targets=config.lora_targets, dtype=param_dtype,
        )  # fmt: skip

    # The data, and the memory that a step needs. Activation checkpointing takes as many blocks as memory demands.
    data = open_data(config, pretrained, model.config.vocab_size, world)
    refuse_finished(config)
    states = None if config.optimizer_state_dtype is None else TORCH_DTYPES[config.optimizer_state_dtype]
    build = partial(build_optimizer, name=config.optimizer, state_dtype=states, weight_decay=config.weight_decay)
    estimate = memory_needs(model, build(model), config, world, compute_dtype)
    checkpointed_blocks = apply_activation_checkpointing(model, config.activation_checkpointing, world, estimate)
    reshard_after_forward = must_reshard_after_forward(world, estimate, checkpointed_blocks)
    estimate = partial(estimate, keep_unsharded=not reshard_after_forward)
    made = make_plan(
        model, config, world, description=data.description, rows=len(data.training),
        passes=data.training.mixture.rows_per_epoch, validation_rows=len(data.validation),
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
        if data.new_tokenizer:
            model.generation_config = GENERATION_CONFIG
        torch.manual_seed(config.seed + world.rank)  # dropout
        model.train()

        optimizer = build(model)
        width, lora = model.config.hidden_size, config.lora_rank is not None
        peak = config.learning_rate or default_learning_rate(width, pretrained=pretrained is not None, lora=lora)
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
        for line in (run.line, *(f"warning: {warning}" for warning in run.warnings)):
            metrics.say(line)
        if config.resume:
            begins = f"resumes after step {progress.step}" if progress.step else "has no checkpoint, starts again"
            metrics.say(f"{output}: {begins}")
        resume = resume_command(output, world)
        losses, saved = distributed.from_first((validation_losses(metrics.records()), checkpoints.steps()))
        validations = Validations(config, losses, saved)
        checkpoints.protected = validations.best
        if lost := validations.lost_line():
            metrics.say(lost)

        def validate(progress: Progress) -> bool:
            """Returns False where a signal interrupts it: the run stops, and a resume makes up for the validation."""
            loss = evaluate(model, data, run.micro_batch_size, world, metrics, stop, progress.step)
            if loss is None:
                return False
            validations.add(progress.step, loss)
            checkpoints.protected = validations.best
            ends = validations.end_run and config.checkpoint_every != 0
            if ends or validations.best == progress.step:
                checkpoints.save(model, optimizer, progress)
                metrics.resume_clock()
            return True

        expected = validation_due(config, progress.step) if progress.step else pretrained is not None
        stopped = expected and progress.step not in validations.losses and not validate(progress)
        while progress.step < config.steps and not stopped and not validations.end_run:
            # The loss is the sum over all supervised tokens of the step, on all ranks, divided by their number.
            profiler.begin(progress.step + 1)
            batches = data.training.micro_batches(progress.rows, config.batch_size, config.micro_batch_size, world)
            count = distributed.total(torch.stack([count_supervised(batch) for batch in batches]).sum())
            loss = torch.zeros((), device=world.device)
            for number, batch in enumerate(batches, 1):
                fsdp.set_gradient_all_reduce(model, enabled=number == len(batches))
                share = model(**batch._asdict(), num_items_in_batch=count.clamp_min(1)).loss
                share.backward()
                loss += share.detach()

            # A step that is not finite updates nothing. The host reads the numbers while the update runs.
            signs = stop.requested, checkpoints.failed, checkpoints.minutes_since_save >= config.checkpoint_minutes
            notes = [torch.full_like(loss, float(sign)) for sign in signs]
            totals, norm = distributed.total(torch.stack([loss, *notes])), fsdp.gradient_norm(model)
            read = read_async(torch.cat([totals, norm[None]]))
            rate = learning_rate(config.schedule, progress.step, config.steps, config.warmup, peak)
            set_learning_rate(optimizer, rate)
            clip_and_step(optimizer, totals[0], norm, config.max_grad_norm)
            optimizer.zero_grad()
            loss_value, told_to_stop, failed, overdue, norm_value = read()
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
            if stopped or checkpoint_due(config, progress.step, overdue=overdue > 0):
                checkpoints.save(model, optimizer, progress)  # written in the background, during validation
                metrics.resume_clock()
            if not stopped and validation_due(config, progress.step) and not validate(progress):
                stopped = True
                checkpoints.save(model, optimizer, progress)

        if stopped or config.no_export:
            checkpoints.wait()
        metrics.finish()
        exported, exported_step = None, progress.step
        if stopped:
            metrics.say(f"Stopped after step {progress.step}. To resume:")
            metrics.say(f"  {resume}")
        elif progress.step < config.steps:
            metrics.say(validations.early_stopping_line())
        if not stopped and not config.no_export:
            save = partial(checkpoints.save, model, optimizer, progress) if config.checkpoint_every == 0 else None
            with rescued(checkpoints, save, resume, metrics.say):
                if config.best_checkpoint:
                    metrics.say(validations.best_line())
                exported_step = validations.best or progress.step
                if exported_step != progress.step:
                    checkpoints.restore_weights(model, exported_step)
                exported = export_run(model, data, config, output, compute_dtype)
            metrics.write({"step": progress.step, "exported": exported.name})  # the run is finished
            chats = data.validation.completion_only and data.tokenizer is not None and bool(data.tokenizer.templates)
            for line in advice(config, world, exported, model.source, chats=chats):
                metrics.say(line)
        if world.is_first:
            draw_curves(metrics.records(), output / "curves.png", str(output), metrics.say)
        publish(config, exported, exported_step, validations.losses.get(exported_step), world, metrics.say)
        distributed.wait_for_all()
        records = distributed.from_first(metrics.records())
    return TrainResult(model, exported_step, records, output, exported)


def with_param_dtype(config: TrainConfig, world: World) -> TrainConfig:
    """The settings with the dtype of the trained parameters chosen: LoRA's are few enough for fp32.

    Whether fp32 products use tf32 is set in torch, for the process. The parameter dtype is a setting of the run from
    here on: it resumes with the same on any number of ranks.
    """
    torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
    half = config.dtype == "bfloat16" and world.size == 1 and not config.lora_rank
    return replace(config, param_dtype=config.param_dtype or ("bfloat16" if half else "float32"))


def export_run(model: CausalLM, data: Data, config: TrainConfig, output: Path, dtype: torch.dtype) -> Path:
    """Writes the model, or the LoRA adapter alone, into the run's folder; returns where."""
    also = partial(save_tokenizer, data.new_tokenizer) if data.new_tokenizer else None
    as_adapter = config.lora_rank is not None and config.lora_export == "adapter"
    exported = output / (ADAPTER if as_adapter else MODEL)
    with replacing(exported) as folder:  # a run that was lengthened has one already
        if as_adapter:
            export_adapter(model, folder, also=also)
        else:
            export(model, folder, dtype=dtype, also=also)
    return exported
