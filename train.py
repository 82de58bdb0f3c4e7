"""Trains a decoder language model.

    python train.py --model qwen2                         the tiny preset on the embedded stories, on a CPU in minutes
    python train.py --model runs/qwen2/model --data chats --lora-rank 8
    python train.py --model llama:8b --data random --dtype bfloat16 --steps 10 --no-export         only speed and memory
    torchrun --nproc-per-node 8 train.py --model meta-llama/Meta-Llama-3-8B --data my.jsonl --dtype bfloat16
    python train.py --resume runs/qwen2

`--help` shows all flags. A step takes --batch-size rows, however many ranks and micro-batches share them: neither
changes what is learned, nor in which order.
"""

import argparse
import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import ligermodels
from ligermodels import distributed
from ligermodels.errors import InputError
from ligermodels.hub import resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import initialize_lora
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.data import Data, open_data, supervised
from ligermodels.training.data.new_tokenizer import GENERATION_CONFIG, save_tokenizer
from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.schedules import default_learning_rate, learning_rate
from ligermodels.training.reporting.curves import draw_curves
from ligermodels.training.reporting.evaluation import evaluate
from ligermodels.training.reporting.flops import peak_flops
from ligermodels.training.reporting.loggers import open_loggers
from ligermodels.training.reporting.metrics import METRICS_FILE, Metrics
from ligermodels.training.reporting.profile import StepProfiler
from ligermodels.training.runs.advice import advice, resume_command
from ligermodels.training.runs.arguments import parse_arguments, title
from ligermodels.training.runs.folder import ADAPTER, CHECKPOINTS, MODEL, default_folder, locked, new_folder
from ligermodels.training.runs.plan import memory_needs, plan
from ligermodels.training.runs.rescue import rescued
from ligermodels.training.runs.resuming import refuse_other_data, refuse_resuming
from ligermodels.training.runs.settings import SETTINGS_FILE, settings, write_settings
from ligermodels.training.runs.stopping import signals
from ligermodels.training.scaling import float8, fsdp
from ligermodels.training.scaling.activation_checkpointing import keeps_gathered, recompute
from ligermodels.training.scaling.compilation import compile_blocks
from ligermodels.training.scaling.host_reads import read_later
from ligermodels.training.scaling.out_of_memory import explained
from ligermodels.weights.loading import load_weights

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


def main(args: argparse.Namespace, world: distributed.World) -> None:
    refuse_resuming(args)

    # The model, without its weights yet. A frozen one is stored in the dtype that is computed in.
    folder = None if args.model in ligermodels.list_architectures() else resolve(args.model, revision=args.revision)
    computed, stored = dtypes(args, world)
    size = None if folder else args.size
    dtype = computed if args.lora_rank else stored
    model = ligermodels.create(folder or args.model, size=size, dtype=dtype, device="meta")
    if args.lora_rank:
        lora = {"rank": args.lora_rank, "alpha": args.lora_alpha, "dropout": args.lora_dropout}
        ligermodels.add_lora(model, **lora, targets=args.lora_targets, dtype=stored)

    # What it learns from, and what that is going to need. Blocks are computed again as far as memory demands.
    data = open_data(args, folder, model.config.vocab_size, world)
    states = None if args.optimizer_state_dtype is None else DTYPES[args.optimizer_state_dtype]
    build = partial(build_optimizer, name=args.optimizer, state_dtype=states, weight_decay=args.weight_decay)
    needs = memory_needs(model, build(model), args, world, computed)
    recomputed = recompute(model, args.activation_checkpointing, world, needs)
    keep_gathered = keeps_gathered(world, needs, recomputed)
    needs = partial(needs, keep_gathered=keep_gathered)
    run = plan(
        model, args, world, description=data.description, rows=len(data.training),
        passes=data.training.mixture.passes, validation_rows=len(data.validation), recomputed=recomputed,
        memory=needs(recomputed=recomputed),
    )  # fmt: skip
    if args.dry_run:
        return print(run.text()) if world.is_first else None

    with ExitStack() as held:
        output = args.output if args.resume else new_folder(args.output, default_folder(title(args)))
        held.enter_context(locked(output))
        held.enter_context(explained(args, needs, run.micro_batch_size, recomputed, run.blocks))
        stop = held.enter_context(signals())
        described = settings(args) | {"data_fingerprint": data.training.fingerprint}
        checkpoints = held.enter_context(Checkpoints(output / CHECKPOINTS, args.keep_checkpoints, described))
        refuse_other_data(args, checkpoints.saved_settings(), data.training.fingerprint)

        # Shard, then give each rank's share of the weights its memory and its values.
        if args.float8:
            float8.convert(model, world.device)
        if args.compile:
            compile_blocks(model)
        fsdp.shard(model, world, computed, replicas=args.dp_replicate, keep_gathered=keep_gathered)
        model.to_empty(device=world.device)
        if folder is None:
            model.initialize(args.seed)
        else:
            load_weights(model, folder)
            initialize_lora(model, torch.Generator(world.device).manual_seed(args.seed))
            model.source = folder
        if data.new_tokenizer:
            model.generation_config = GENERATION_CONFIG
        torch.manual_seed(args.seed + world.rank)  # dropout's
        model.train()

        optimizer = build(model)
        pretrained, width = folder is not None, model.config.hidden_size
        peak = args.learning_rate or default_learning_rate(width, pretrained=pretrained, lora=args.lora_rank is not None)
        say = print if world.is_first else lambda line: None
        progress = (checkpoints.restore(model, optimizer, say) if args.resume else None) or Progress()
        before = progress.seconds

        peak_of_one = peak_flops(world.device, args.dtype)
        loggers = open_loggers(args.log_to, output, settings(args), progress.step) if world.is_first else []
        if world.is_first:
            write_settings(args, output / SETTINGS_FILE)
        metrics = held.enter_context(
            Metrics(
                output, steps=args.steps, done=progress.step, tokens_per_step=run.tokens_per_step, device=world.device,
                flops_per_token=run.flops, peak=peak_of_one and peak_of_one * world.size, loggers=loggers,
                enabled=world.is_first,
            )
        )  # fmt: skip
        traced = args.profile if world.is_first else None
        profiler = held.enter_context(StepProfiler(traced, output / "trace.json.gz", world.device, metrics.say))
        for line in (run.line, *(f"warning: {warning}" for warning in run.warnings)):
            metrics.say(line)
        if args.resume:
            begins = f"goes on after step {progress.step}" if progress.step else "has no checkpoint, begins anew"
            metrics.say(f"{output}: {begins}")
        validate = partial(evaluate, model, data, run.micro_batch_size, world, metrics, stop)
        if pretrained and not progress.step:
            validate(progress.step)

        resume = resume_command(output, world)
        stopped = False
        while progress.step < args.steps and not stopped:
            # The loss is the sum over all supervised tokens of the step, on all ranks, divided by their number.
            profiler.begin(progress.step + 1)
            batches = data.training.micro_batches(progress.rows, args.batch_size, args.micro_batch_size, world)
            count = distributed.total(torch.stack([supervised(batch) for batch in batches]).sum())
            loss = torch.zeros((), device=world.device)
            for number, batch in enumerate(batches, 1):
                fsdp.reduce_gradients(model, now=number == len(batches))
                share = model(**batch._asdict(), num_items_in_batch=count.clamp_min(1)).loss
                share.backward()
                loss += share.detach()

            # Nothing is updated from what is not finite; the host reads the numbers while the update runs.
            notes = [torch.full_like(loss, float(note)) for note in (stop.requested, checkpoints.failed)]
            totals, norm = distributed.total(torch.stack([loss, *notes])), fsdp.gradient_norm(model)
            read = read_later(torch.cat([totals, norm[None]]))
            rate = learning_rate(args.schedule, progress.step, args.steps, args.warmup, peak)
            set_learning_rate(optimizer, rate)
            clip_and_step(optimizer, totals[0], norm, args.max_grad_norm)
            optimizer.zero_grad()
            loss_value, told_to_stop, failed, norm_value = read()
            finite = math.isfinite(loss_value) and math.isfinite(norm_value)
            metrics.step(progress.step + 1, loss_value, norm_value, rate, skipped=not finite)
            profiler.end(last=progress.step + 1 == args.steps)
            if not finite:
                places = data.training.places(progress.rows, args.batch_size)
                metrics.write({"step": progress.step + 1, "not_finite": places})
                if args.on_nan == "stop":
                    if progress.step:
                        checkpoints.save(model, optimizer, progress)  # which are as they were before this step
                        checkpoints.wait()
                    raise InputError(
                        f"step {progress.step + 1}: loss {loss_value}, gradient norm {norm_value}: stopped before the "
                        f"update; {output / METRICS_FILE} names the step's documents; lower --learning-rate, or go on "
                        f"without such steps: {resume} --on-nan skip"
                    )

            progress = replace(
                progress, step=progress.step + 1, rows=progress.rows + args.batch_size,
                tokens=progress.tokens + run.tokens_per_step, seconds=before + metrics.seconds,
            )  # fmt: skip
            stopped = told_to_stop > 0 and progress.step < args.steps
            if failed:
                checkpoints.wait()  # which raises
            all_there_is = args.no_export and progress.step == args.steps
            if stopped or (args.checkpoint_every and (all_there_is or progress.step % args.checkpoint_every == 0)):
                checkpoints.save(model, optimizer, progress)  # before what takes long: it is written meanwhile
                metrics.resume_clock()
            if progress.step % args.eval_every == 0 or progress.step == args.steps:
                validate(progress.step)

        checkpoints.wait()
        metrics.finish()
        if stopped:
            metrics.say(f"Stopped after step {progress.step}. To go on:")
            metrics.say(f"  {resume}")
        elif not args.no_export:
            with rescued(checkpoints, model, optimizer, progress, resume):
                export(model, data, args, output, computed, world, metrics)
        if world.is_first:
            draw_curves(output / METRICS_FILE, output / "curves.png", str(output))
        distributed.wait_for_all()


def dtypes(args: argparse.Namespace, world: distributed.World) -> tuple[torch.dtype, torch.dtype]:
    """What is computed in, and what trained weights are stored in: LoRA's are few enough for fp32.

    Whether fp32 products take tf32 is told to torch, for the process. How weights are stored is a setting of the run
    from here on: it goes on with the same on any number of ranks.
    """
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    half = args.dtype == "bfloat16" and world.size == 1 and not args.lora_rank
    args.param_dtype = args.param_dtype or ("bfloat16" if half else "float32")
    return DTYPES[args.dtype], DTYPES[args.param_dtype]


def export(
    model: CausalLM, data: Data, args: argparse.Namespace, output: Path, dtype: torch.dtype, world: distributed.World,
    metrics: Metrics,
) -> None:  # fmt: skip
    """Writes the model, or what LoRA added to it, and says how to go on."""
    also = partial(save_tokenizer, data.new_tokenizer) if data.new_tokenizer else None
    if args.lora_rank and args.lora_export == "adapter":
        saved = output / ADAPTER
        ligermodels.export_adapter(model, saved, also=also)
    else:
        saved = output / MODEL
        ligermodels.export(model, saved, dtype=dtype, also=also)
    chats = data.validation.of_answers and data.tokenizer is not None and bool(data.tokenizer.templates)
    for line in advice(args, world, saved, model.source, chats=chats):
        metrics.say(line)


if __name__ == "__main__":
    try:
        main(parse_arguments(sys.argv[1:]), distributed.start())
    except InputError as error:
        if distributed.first_to_fail():
            print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        distributed.stop()
