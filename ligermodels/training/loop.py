"""The training loop: one run, to be read from top to bottom, from `train` on.

    from ligermodels.training import TrainConfig, train
    result = train(TrainConfig(model="qwen2", steps=200))

A step takes the same units (sequences, pairs, examples), however many ranks and micro-batches share them: neither
changes what is learned, nor in which order. What is minimised, and on which data, is the objective's (objectives/).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ligermodels import distributed
from ligermodels.errors import InputError
from ligermodels.hub import export, export_adapter
from ligermodels.layers.checkpointing.host_memory import read_async
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.data.run_tokenizer import generation_config, write_tokenizer
from ligermodels.training.micro_batches import MicroBatches, captures_graphs
from ligermodels.training.model_weights import give_initial_weights
from ligermodels.training.objectives import RunSetup, StepTotals, Work
from ligermodels.training.optimizers import OptimizerInBackward, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.schedules import learning_rate
from ligermodels.training.optimizers.update_check import UpdateCheck
from ligermodels.training.parallel import float8, fsdp
from ligermodels.training.parallel.compilation import compile_blocks, deterministic_algorithms
from ligermodels.training.parallel.context_parallel import context_group
from ligermodels.training.parallel.out_of_memory import out_of_memory_advice
from ligermodels.training.planning.plan import refuse_without_host_memory
from ligermodels.training.preparing import Run, make_optimizer, prepare
from ligermodels.training.reporting.curves import draw_curves, notebook_plots
from ligermodels.training.reporting.flops import peak_flops
from ligermodels.training.reporting.loggers import Logger, open_loggers
from ligermodels.training.reporting.metrics import METRICS_FILE, Metrics
from ligermodels.training.reporting.profile import StepProfiler
from ligermodels.training.run.advice import advice, resume_command
from ligermodels.training.run.folder import ADAPTER, CHECKPOINTS, MODEL, RunStatus, default_folder, locked, new_folder
from ligermodels.training.run.heartbeat import heartbeat
from ligermodels.training.run.publishing import publish
from ligermodels.training.run.resuming import (
    MODEL_FINGERPRINT,
    config_fingerprint,
    reading_data,
    refuse_other_data,
    refuse_other_model,
    rescued,
)
from ligermodels.training.run.stopping import Stop, signals
from ligermodels.training.run.validations import Validations, checkpoint_due, validation_due, validation_losses
from ligermodels.training.settings.config import TrainConfig
from ligermodels.training.settings.settings import SETTINGS_FILE, settings, write_settings
from ligermodels.weights.sharding import reshard


@dataclass(frozen=True)
class TrainResult:
    """What a run returns.

    The model is as it was trained; under FSDP2 its parameters are DTensors. step is the one after which it had these
    weights: the last one, or that with the lowest validation loss (`best_checkpoint`). metrics has the records of
    metrics.jsonl, in order, such as {"step": 1, "loss": 6.9, …}. folder is that of the run, and exported the model's or
    the adapter's folder in it; None where nothing was exported. signal is the number of the one that stopped the run on
    any rank; 0 for a run that came to its end. summary is the last line that it prints: its steps, tokens and time.
    """

    model: CausalLM
    step: int
    metrics: list[dict[str, Any]]
    folder: Path
    exported: Path | None
    signal: int
    summary: str


@dataclass(frozen=True)
class Session:
    """A run while it trains: what it holds open from its first step to its last.

    resume is the command that resumes it. seconds_before is the time that it had trained before it was resumed.
    """

    run: Run
    output: Path
    stop: Stop
    checkpoints: Checkpoints
    optimizer: AdamW
    in_backward: OptimizerInBackward | None
    micro_batches: MicroBatches
    check: UpdateCheck
    metrics: Metrics
    profiler: StepProfiler
    status: RunStatus
    validations: Validations
    resume: str
    seconds_before: float

    def save(self, progress: Progress) -> None:
        self.checkpoints.save(self.run.model, self.optimizer, progress)

    def reading(self, progress: Progress) -> AbstractContextManager[None]:
        """Surrounds what reads data of the run: where they cannot be read, the last step is saved."""
        return reading_data(self.checkpoints, partial(self.save, progress), progress.step, self.resume)


class Taken(NamedTuple):
    """A step that was taken. stop_requested, failed and overdue tell of all ranks: whether one was signalled to stop,
    could not write a checkpoint, or has the last checkpoint longer behind it than `checkpoint_minutes`."""

    work: Work
    loss: float
    norm: float
    stop_requested: bool
    failed: bool
    overdue: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def train(config: TrainConfig, *, loggers: Sequence[Logger] = ()) -> TrainResult:
    """Makes a run: trains, validates, saves checkpoints, exports. Under torchrun every rank calls.

    loggers: get every record of metrics.jsonl on the first rank, beside those of `log_to`, and are closed at the end.
    Everything is written into the run's folder (docs/training.md). SIGTERM, SIGINT and SIGHUP end it after its
    current step, with a checkpoint; before its first step at once. A process group that it starts stays:
    `ligermodels.distributed.stop()` leaves it.
    Raises InputError for what cannot be run, before memory is allocated where that is known by then.
    """
    with ExitStack() as held:
        stop = held.enter_context(signals())
        world = distributed.start()
        held.enter_context(heartbeat())
        run = prepare(config, world)
        refuse_without_host_memory(run.plan)
        session, progress = open_session(run, stop, held, loggers)
        stop.takes_steps = True
        metrics, validations = session.metrics, session.validations
        expected = validation_due(run.config, progress.step) if progress.step else run.pretrained is not None
        stopped = expected and progress.step not in validations.losses and not validate(session, progress)
        while progress.step < run.config.steps and not stopped and not validations.end_run:
            taken = take_step(session, progress)
            if taken.is_finite:
                run.objective.finish_step(run.model, progress.step + 1)
            else:
                report_not_finite(session, progress, taken)
            progress = replace(
                progress, step=progress.step + 1, rows=progress.rows + taken.work.units,
                tokens=progress.tokens + taken.work.tokens, seconds=session.seconds_before + metrics.seconds,
            )  # fmt: skip
            stopped = taken.stop_requested and progress.step < run.config.steps
            if taken.failed:
                session.checkpoints.wait()  # which raises
            if stopped or checkpoint_due(run.config, progress.step, overdue=taken.overdue):
                session.save(progress)  # written in the background, during validation
                metrics.resume_clock()
            if not stopped and validation_due(run.config, progress.step) and not validate(session, progress):
                stopped = True
                session.save(progress)
        exported, step = finish(session, progress, stopped=stopped)
        records = distributed.from_first(metrics.records())
        signal = max(distributed.gather_objects(session.stop.signal)) if stopped else 0
    return TrainResult(run.model, step, records, session.output, exported, signal, metrics.summary())


def open_session(run: Run, stop: Stop, held: ExitStack, loggers: Sequence[Logger]) -> tuple[Session, Progress]:
    """Opens the run's folder, gives the model its weights, and restores the newest checkpoint of a run to resume.

    What must be closed again is entered into `held`.
    """
    config, world = run.config, run.world
    held.enter_context(deterministic_algorithms(config.deterministic, compiled=config.compile))
    output = config.resume or new_folder(config.output, default_folder(config.title))
    # From here on --resume works; a resumed run writes its settings when it is restored.
    held.enter_context(locked(output, None if config.resume else partial(write_first_files, config)))
    micro_batch_size, checkpointed = run.plan.micro_batch_size, run.plan.checkpointing.blocks
    held.enter_context(out_of_memory_advice(config, run.estimate, micro_batch_size, checkpointed, run.plan.blocks))
    fingerprint = run.objective.data.training.fingerprint
    of_model = config_fingerprint(run.model.config.raw)
    described = settings(config) | {"data_fingerprint": fingerprint, MODEL_FINGERPRINT: of_model}
    checkpoints = held.enter_context(
        Checkpoints(output / CHECKPOINTS, config.keep_checkpoints, described, run.objective)
    )
    saved = checkpoints.saved_settings()
    refuse_other_data(config, saved, fingerprint)
    refuse_other_model(config, saved, of_model)
    say = print if world.is_first else lambda line: None
    place_model(run, output, say)

    optimizer = make_optimizer(config, run.model)
    if "optimizer" in config.offload:
        optimizer.offload_states()
    in_backward = OptimizerInBackward(optimizer, config.max_grad_norm) if config.optimizer_in_backward else None
    check = UpdateCheck(optimizer.shards(), config.warmup, config.steps)
    progress = (checkpoints.restore(run.model, optimizer, say) if config.resume else None) or Progress()
    metrics, profiler = open_metrics(run, output, progress, say, held, loggers)
    resume = resume_command(output, world, allow_changes=config.allow_changes)
    status = open_status(run, output, progress, metrics, resume, held)
    losses, steps = distributed.from_first((validation_losses(metrics.records()), checkpoints.steps()))
    validations = Validations(config, losses, steps)
    checkpoints.protected = validations.best
    if lost := validations.lost_line():
        metrics.say(lost)
    micro_batches = MicroBatches(run.model, run.objective, in_backward, captures=captures_graphs(run))
    session = Session(
        run, output, stop, checkpoints, optimizer, in_backward, micro_batches, check, metrics, profiler, status,
        validations, resume, seconds_before=progress.seconds,
    )  # fmt: skip
    return session, progress


def write_first_files(config: TrainConfig, folder: Path) -> None:
    write_settings(config, folder / SETTINGS_FILE)


def place_model(run: Run, output: Path, say: Callable[[str], Any]) -> None:
    """Shards the model, then gives each rank's share of the weights its memory and its values."""
    config, world, model, data = run.config, run.world, run.model, run.objective.data
    if config.float8_by_torchao:
        float8.convert(model, world.device)
    if config.compile:
        compile_blocks(model, world.device)
    run.shard(model)
    offloads = "weights" in config.offload
    give_initial_weights(model, run.pretrained, run.adapter, config.seed, world.device, offloads=offloads)
    model.generation_config = generation_config(
        data.tokenizer, model.generation_config, model.config.raw, chats=trains_chats(run)
    )
    run.objective.prepare(model, RunSetup(output, run.plan.micro_batch_size, context_group(world), say))
    reshard(model)  # a pass without gradients leaves weights gathered, which the optimizer must not see
    torch.manual_seed(config.seed + world.rank)  # dropout
    model.train()


def trains_chats(run: Run) -> bool:
    """Whether the run trains on conversations."""
    tokenizer = run.objective.data.tokenizer
    has_template = tokenizer is not None and bool(tokenizer.templates)
    return run.config.chat_template is not None or (has_template and run.objective.trains_chats)


def open_metrics(
    run: Run, output: Path, progress: Progress, say: Callable[[str], Any], held: ExitStack, given: Sequence[Logger]
) -> tuple[Metrics, StepProfiler]:
    """Opens what a run measures and shows. given: loggers beside those of the settings."""
    config, world = run.config, run.world
    loggers = open_loggers(config.log_to, output, settings(config), progress.step) if world.is_first else []
    plots = notebook_plots(output, progress.step, config.objective, say) if world.is_first else []
    if config.resume and world.is_first:
        write_settings(config, output / SETTINGS_FILE)
    peak_of_one = peak_flops(world.device, config.dtype)
    metrics = held.enter_context(
        Metrics(
            output, steps=config.steps, done=progress.step, device=world.device, flops_per_token=run.plan.flops,
            peak=peak_of_one and peak_of_one * world.size, loggers=[*loggers, *plots, *given], enabled=world.is_first,
            log_every=0 if plots else config.log_every,
        )
    )  # fmt: skip
    traced = config.profile if world.is_first else None
    return metrics, held.enter_context(StepProfiler(traced, output / "trace.json.gz", world.device, metrics.say))


def open_status(
    run: Run, output: Path, progress: Progress, metrics: Metrics, resume: str, held: ExitStack
) -> RunStatus:
    """Opens run.json, and says what the run is going to do. resume: the command that resumes it."""
    plan, world = run.plan, run.world
    facts = {"resume": resume, "ranks": world.size, "plan": plan.line}
    status = held.enter_context(RunStatus(output, facts, say=metrics.say, enabled=world.is_first))
    for line in (plan.line, *plan.notes):
        metrics.say(line)
    for warning in plan.warnings:
        status.warn(progress.step, warning)
    if run.config.resume:
        begins = f"resumes after step {progress.step}" if progress.step else "has no checkpoint, starts again"
        metrics.say(f"{output}: {begins}")
    return status


def take_step(session: Session, progress: Progress) -> Taken:
    """Takes the step behind `progress`. Its loss is a sum over its units, on all ranks, divided by their number."""
    run, optimizer, in_backward, check = session.run, session.optimizer, session.in_backward, session.check
    config, model, objective, number = run.config, run.model, run.objective, progress.step + 1
    session.profiler.begin(number)
    with session.reading(progress):
        work = objective.work(model, progress)
    step = StepTotals(run.world.device)
    rate = learning_rate(config.schedule, progress.step, config.steps, config.warmup, config.learning_rate)
    set_learning_rate(optimizer, rate)
    step.sums |= check.sums(progress.step)
    optimizer.check = check if check.begins(progress.step) else None
    for index, batch in enumerate(work.batches, 1):
        fsdp.set_gradient_all_reduce(model, enabled=index == len(work.batches))
        step.add(session.micro_batches.backward(batch, work))

    # A step that is not finite updates nothing, except during backward. The host reads while the update runs.
    checkpoints = session.checkpoints
    overdue = checkpoints.minutes_since_save >= config.checkpoint_minutes
    signs = session.stop.requested, checkpoints.failed, overdue
    totals = step.over_ranks(signs)
    fsdp.sum_replicated_gradients(model)
    norm = fsdp.gradient_norm(model) if in_backward is None else in_backward.finish()
    read = read_async(torch.cat([norm[None], totals]))
    if in_backward is None:
        clip_and_step(optimizer, totals[0], norm, config.max_grad_norm)
    optimizer.zero_grad()
    norm_value, *values = read()
    (loss_value, *told), sums, maxima = step.named(values, len(signs))
    taken = Taken(work, loss_value, norm_value, *(sign > 0 for sign in told))

    updates = check.metrics(sums)
    measured = {**work.metrics, **objective.metrics(sums, maxima, number), **updates}
    session.metrics.step(
        number, loss_value, norm_value, rate, tokens=work.tokens, values=measured, skipped=not taken.is_finite
    )
    lossy = config.param_rounding if config.loses_updates else None
    for warning in (*objective.warnings(measured, number), *check.warnings(progress.step, updates, lossy)):
        session.status.warn(number, warning)
    session.profiler.end(last=number == config.steps)
    return taken


def report_not_finite(session: Session, progress: Progress, taken: Taken) -> None:
    """Writes which documents the step had. Raises InputError, unless --on-nan says to skip such steps."""
    run, number = session.run, progress.step + 1
    places = run.objective.data.training.places(progress.rows, taken.work.units)
    session.metrics.write({"step": number, "not_finite": places})
    found = f"step {number}: loss {taken.loss}, gradient norm {taken.norm}"
    documents = f"{session.output / METRICS_FILE} names the step's documents; lower --learning-rate"
    if session.in_backward is not None:
        raise InputError(
            f"{found}: stopped during the update; {documents}, and continue from the checkpoint before: "
            f"{session.resume}"
        )
    if run.config.on_nan == "stop":
        if progress.step:
            session.save(progress)  # as they were before this step
            session.checkpoints.wait()
        raise InputError(
            f"{found}: stopped before the update; {documents}, or continue without such steps: "
            f"{session.resume} --on-nan skip"
        )


def validate(session: Session, progress: Progress) -> bool:
    """Returns False where a signal interrupts it: the run stops, and a resume makes up for the validation."""
    run, validations = session.run, session.validations
    with session.reading(progress):
        found = run.objective.validate(run.model, progress.step, session.stop)
    if found is None:
        return False
    session.metrics.validation(progress.step, found)
    validations.add(progress.step, found.loss)
    session.checkpoints.protected = validations.best
    ends = validations.end_run and run.config.checkpoint_every != 0
    if ends or validations.best == progress.step:
        session.save(progress)
        session.metrics.resume_clock()
    return True


def finish(session: Session, progress: Progress, *, stopped: bool) -> tuple[Path | None, int]:
    """Exports a run that was not stopped, and says how to go on. Returns the export's folder, and the step after which
    the model had the weights that it has now."""
    run, metrics, validations = session.run, session.metrics, session.validations
    config, exports = run.config, not stopped and not run.config.no_export
    if not exports:
        session.checkpoints.wait()
    metrics.bar.close()  # later lines appear below
    if stopped:
        metrics.say(f"Stopped after step {progress.step}. To resume:")
        metrics.say(f"  {session.resume}")
    elif progress.step < config.steps:
        metrics.say(validations.early_stopping_line())
    exported, step = export_best(session, progress) if exports else (None, progress.step)
    if run.world.is_first:
        picture = session.output / "curves.png"
        draw_curves(metrics.records(), picture, str(session.output), config.objective, metrics.say)
    publish(config, exported, step, validations.losses.get(step), run.world, metrics.say)
    if metrics.completed:
        metrics.say(metrics.summary())
    session.status.end("stopped" if stopped else "finished")
    distributed.wait_for_all()
    return exported, step


def export_best(session: Session, progress: Progress) -> tuple[Path, int]:
    """Exports the last weights, or the best ones with --best-checkpoint. Returns the folder and the step of these."""
    run, metrics, checkpoints = session.run, session.metrics, session.checkpoints
    save = partial(session.save, progress) if run.config.checkpoint_every == 0 else None
    with rescued(checkpoints, save, session.resume, metrics.say):
        if run.config.best_checkpoint:
            metrics.say(session.validations.best_line())
        step = session.validations.best or progress.step
        if step != progress.step:
            checkpoints.restore_weights(run.model, step)
        exported = export_run(run, session.output)
    metrics.write({"step": progress.step, "exported": exported.name})  # the run is finished
    for line in advice(run.config, run.world, exported, chats=trains_chats(run)):
        metrics.say(line)
    return exported, step


def export_run(run: Run, output: Path) -> Path:
    """Writes the model, or the LoRA adapter alone, into the run's folder; returns where.

    A whole model has the compute dtype where parameters may be wider. Beside LoRA the base has it already, and what
    LoRA leaves as it is can be copied as it is stored, experts in few bits too. It replaces the export of a run that
    was lengthened.
    """
    config, model, adapter, data = run.config, run.model, run.adapter, run.objective.data
    template = data.tokenizer.chat_template if data.tokenizer and config.chat_template else None
    also = partial(
        write_tokenizer, source=adapter if adapter and has_tokenizer(adapter) else None, new=data.new_tokenizer,
        template=template, generation_config=model.generation_config, images=data.new_images,
    )  # fmt: skip
    if config.exports_adapter:
        export_adapter(model, output / ADAPTER, also=also, overwrite=True)
        return output / ADAPTER
    export(model, output / MODEL, dtype=None if config.with_lora else run.dtype, also=also, overwrite=True)
    return output / MODEL
