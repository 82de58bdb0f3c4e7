"""The training loop: one run, to be read from top to bottom.

    from ligermodels.training import TrainConfig, train
    result = train(TrainConfig(model="qwen2", steps=200))

A step takes the same units (sequences, pairs, examples), however many ranks and micro-batches share them: neither
changes what is learned, nor in which order. What is minimised, and on which data, is the objective's (objectives/).
"""

import math
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ligermodels import distributed
from ligermodels.errors import InputError
from ligermodels.hub import export, export_adapter
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.host_memory import read_async
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.config import TrainConfig
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.training.data.run_tokenizer import generation_config, write_tokenizer
from ligermodels.training.objectives import StepTotals
from ligermodels.training.optimizers import OptimizerInBackward, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.schedules import learning_rate
from ligermodels.training.optimizers.update_check import UpdateCheck
from ligermodels.training.reporting.curves import draw_curves
from ligermodels.training.reporting.flops import peak_flops
from ligermodels.training.reporting.loggers import open_loggers
from ligermodels.training.reporting.metrics import METRICS_FILE, Metrics
from ligermodels.training.reporting.notebook import notebook_plots
from ligermodels.training.reporting.profile import StepProfiler
from ligermodels.training.runs.advice import advice, resume_command
from ligermodels.training.runs.defaults import TORCH_DTYPES
from ligermodels.training.runs.folder import ADAPTER, CHECKPOINTS, MODEL, default_folder, locked, new_folder
from ligermodels.training.runs.model_weights import give_initial_weights
from ligermodels.training.runs.preparing import prepare
from ligermodels.training.runs.publishing import publish
from ligermodels.training.runs.resuming import reading_data, refuse_other_data, rescued
from ligermodels.training.runs.settings import SETTINGS_FILE, settings, write_settings
from ligermodels.training.runs.status import RunStatus
from ligermodels.training.runs.stopping import signals
from ligermodels.training.runs.validations import Validations, checkpoint_due, validation_due, validation_losses
from ligermodels.training.scaling import float8, fsdp
from ligermodels.training.scaling.compilation import compile_blocks, deterministic_algorithms
from ligermodels.training.scaling.context_parallel import context_group
from ligermodels.training.scaling.out_of_memory import out_of_memory_advice
from ligermodels.weights.sharding import reshard
from ligermodels.weights.writing import failure


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


def train(config: TrainConfig) -> TrainResult:
    """Makes a run: trains, validates, saves checkpoints, exports. Under torchrun every rank calls.

    Everything is written into the run's folder (docs/training.md). SIGTERM, SIGINT and SIGHUP end it after its
    current step, with a checkpoint. A process group that it starts stays: `ligermodels.distributed.stop()` leaves it.
    Raises InputError for what cannot be run, before memory is allocated where that is known by then.
    """
    prepared = prepare(config, distributed.start())
    config, world, pretrained, adapter, model, objective, build, estimate, shard, run = prepared
    data = objective.data
    compute_dtype = TORCH_DTYPES[config.dtype]
    has_template = data.tokenizer is not None and bool(data.tokenizer.templates)
    chats = config.chat_template is not None or (has_template and objective.trains_chats)

    with ExitStack() as held:
        held.enter_context(deterministic_algorithms(config.deterministic, compiled=config.compile))
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
        checkpoints = held.enter_context(
            Checkpoints(output / CHECKPOINTS, config.keep_checkpoints, described, objective)
        )
        refuse_other_data(config, checkpoints.saved_settings(), data.training.fingerprint)

        # Shard, then give each rank's share of the weights its memory and its values.
        if config.float8:
            float8.convert(model, world.device)
        if config.compile:
            compile_blocks(model, world.device)
        shard(model)
        give_initial_weights(model, pretrained, adapter, config.seed, world.device)
        model.generation_config = generation_config(
            data.tokenizer, model.generation_config, model.config.raw, chats=chats
        )
        say = print if world.is_first else lambda line: None
        objective.folder, objective.context = output, context_group(world)
        objective.prepare(model, say)
        reshard(model)  # a pass without gradients leaves weights gathered, which the optimizer must not see
        torch.manual_seed(config.seed + world.rank)  # dropout
        model.train()

        optimizer = build(model)
        if "optimizer" in config.offload:
            optimizer.offload_states()
        in_backward = OptimizerInBackward(optimizer, config.max_grad_norm) if config.optimizer_in_backward else None
        check = UpdateCheck(optimizer.shards(), first=config.warmup)
        progress = (checkpoints.restore(model, optimizer, say) if config.resume else None) or Progress()
        before = progress.seconds

        peak_of_one = peak_flops(world.device, config.dtype)
        loggers = open_loggers(config.log_to, output, settings(config), progress.step) if world.is_first else []
        plots = notebook_plots(output, progress.step, say) if world.is_first else []
        if config.resume and world.is_first:
            write_settings(config, output / SETTINGS_FILE)
        metrics = held.enter_context(
            Metrics(
                output, steps=config.steps, done=progress.step, device=world.device, flops_per_token=run.flops,
                peak=peak_of_one and peak_of_one * world.size, loggers=[*loggers, *plots], enabled=world.is_first,
                prints_steps=not plots,
            )
        )  # fmt: skip
        traced = config.profile if world.is_first else None
        profiler = held.enter_context(StepProfiler(traced, output / "trace.json.gz", world.device, metrics.say))
        resume = resume_command(output, world)
        facts = {"resume": resume, "ranks": world.size, "tokens_per_step": run.tokens_per_step, "plan": run.line}
        status = held.enter_context(RunStatus(output, facts, say=metrics.say, enabled=world.is_first))
        for line in (run.line, *run.notes):
            metrics.say(line)
        for warning in run.warnings:
            status.warn(progress.step, warning)
        if config.resume:
            begins = f"resumes after step {progress.step}" if progress.step else "has no checkpoint, starts again"
            metrics.say(f"{output}: {begins}")
        losses, saved = distributed.from_first((validation_losses(metrics.records()), checkpoints.steps()))
        validations = Validations(config, losses, saved)
        checkpoints.protected = validations.best
        if lost := validations.lost_line():
            metrics.say(lost)

        def reading(progress: Progress) -> AbstractContextManager[None]:
            save = partial(checkpoints.save, model, optimizer, progress)
            return reading_data(checkpoints, save, progress.step, resume)

        def validate(progress: Progress) -> bool:
            """Returns False where a signal interrupts it: the run stops, and a resume makes up for the validation."""
            with reading(progress):
                found = objective.validate(model, progress.step, stop)
            if found is None:
                return False
            metrics.validation(progress.step, found)
            validations.add(progress.step, found.loss)
            checkpoints.protected = validations.best
            ends = validations.end_run and config.checkpoint_every != 0
            if ends or validations.best == progress.step:
                checkpoints.save(model, optimizer, progress)
                metrics.resume_clock()
            return True

        expected = validation_due(config, progress.step) if progress.step else pretrained is not None
        stopped = expected and progress.step not in validations.losses and not validate(progress)
        while progress.step < config.steps and not stopped and not validations.end_run:
            # The loss is a sum over the units of the step, on all ranks, divided by their number.
            profiler.begin(progress.step + 1)
            with reading(progress):
                work = objective.work(model, progress)
            step = StepTotals(world.device)
            rate = learning_rate(config.schedule, progress.step, config.steps, config.warmup, config.learning_rate)
            set_learning_rate(optimizer, rate)
            step.sums |= check.sums(progress.step)
            optimizer.check = check if check.begins(progress.step) else None
            for number, batch in enumerate(work.batches, 1):
                fsdp.set_gradient_all_reduce(model, enabled=number == len(work.batches))
                share = objective.loss(model, batch, work)
                if in_backward is not None:
                    in_backward.begin(share.loss)
                share.loss.backward()
                step.add(share)

            # A step that is not finite updates nothing, except during backward. The host reads while the update runs.
            signs = stop.requested, checkpoints.failed, checkpoints.minutes_since_save >= config.checkpoint_minutes
            totals = step.over_ranks(signs)
            fsdp.sum_replicated_gradients(model)
            norm = fsdp.gradient_norm(model) if in_backward is None else in_backward.finish()
            read = read_async(torch.cat([norm[None], totals]))
            if in_backward is None:
                clip_and_step(optimizer, totals[0], norm, config.max_grad_norm)
            optimizer.zero_grad()
            norm_value, *values = read()
            (loss_value, told_to_stop, failed, overdue), sums, maxima = step.named(values, len(signs))
            finite = math.isfinite(loss_value) and math.isfinite(norm_value)
            updates = check.metrics(sums)
            measured = {**work.metrics, **objective.metrics(sums, maxima, progress.step + 1), **updates}
            metrics.step(
                progress.step + 1, loss_value, norm_value, rate, tokens=work.tokens, values=measured,
                skipped=not finite,
            )  # fmt: skip
            lossy = config.param_rounding if config.loses_updates else None
            for warning in (*objective.warnings(measured), *check.warnings(progress.step, updates, lossy)):
                status.warn(progress.step + 1, warning)
            profiler.end(last=progress.step + 1 == config.steps)
            if not finite:
                places = data.training.places(progress.rows, work.units)
                metrics.write({"step": progress.step + 1, "not_finite": places})
                if in_backward is not None:
                    raise InputError(
                        f"step {progress.step + 1}: loss {loss_value}, gradient norm {norm_value}: stopped during the "
                        f"update; {output / METRICS_FILE} names the step's documents; lower --learning-rate, and "
                        f"continue from the checkpoint before: {resume}"
                    )
                if config.on_nan == "stop":
                    if progress.step:
                        checkpoints.save(model, optimizer, progress)  # as they were before this step
                        checkpoints.wait()
                    raise InputError(
                        f"step {progress.step + 1}: loss {loss_value}, gradient norm {norm_value}: stopped before the "
                        f"update; {output / METRICS_FILE} names the step's documents; lower --learning-rate, or "
                        f"continue without such steps: {resume} --on-nan skip"
                    )
            else:
                objective.finish_step(model, progress.step + 1)

            progress = replace(
                progress, step=progress.step + 1, rows=progress.rows + work.units,
                tokens=progress.tokens + work.tokens, seconds=before + metrics.seconds,
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
                exported = export_run(model, data, config, adapter, output, compute_dtype)
            metrics.write({"step": progress.step, "exported": exported.name})  # the run is finished
            for line in advice(config, world, exported, chats=chats):
                metrics.say(line)
        if world.is_first:
            draw_curves(metrics.records(), output / "curves.png", str(output), metrics.say)
        publish(config, exported, exported_step, validations.losses.get(exported_step), world, metrics.say)
        status.end("stopped" if stopped else "finished")
        distributed.wait_for_all()
        records = distributed.from_first(metrics.records())
    return TrainResult(model, exported_step, records, output, exported)


def export_run(
    model: CausalLM,
    data: Data | PreferenceData,
    config: TrainConfig,
    adapter: Path | None,
    output: Path,
    dtype: torch.dtype,
) -> Path:
    """Writes the model, or the LoRA adapter alone, into the run's folder; returns where.

    dtype: of the weights where parameters may be wider. Beside LoRA the base has it already, and what LoRA leaves as it
    is can be copied as it is stored, experts in few bits too. It replaces the export of a run that was lengthened.
    """
    template = data.tokenizer.chat_template if data.tokenizer and config.chat_template else None
    also = partial(
        write_tokenizer, source=adapter if adapter and has_tokenizer(adapter) else None, new=data.new_tokenizer,
        template=template, generation_config=model.generation_config, images=data.new_images,
    )  # fmt: skip
    if config.exports_adapter:
        export_adapter(model, output / ADAPTER, also=also, overwrite=True)
        return output / ADAPTER
    export(model, output / MODEL, dtype=None if config.with_lora else dtype, also=also, overwrite=True)
    return output / MODEL
