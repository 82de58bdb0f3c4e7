"""What `ligermodels info` prints: a model's shape, parameters, files, and its memory for training and generation."""

import argparse
import copy
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ligermodels.adapters.lora_targets import add_lora
from ligermodels.adapters.quantising import quantise
from ligermodels.cli.flags import print_line
from ligermodels.configs.features import MoEConfig
from ligermodels.distributed import planned_world
from ligermodels.errors import InputError
from ligermodels.hub.description import Description, describe
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import (
    InferenceMemory,
    TrainingMemory,
    count_parameters,
    decoder_blocks,
    inference_memory,
    training_memory,
)
from ligermodels.plot_style import BLUE, GREEN, GREY, INK, OCHRE, ORANGE, PINK, PLOT_STYLE, PURPLE, TEAL
from ligermodels.training.fitting import rows_of_step, trainings, verdict, ways_of
from ligermodels.training.parallel.activation_checkpointing import device_memory, device_name
from ligermodels.units import byte_size, counted, memory_size

PART_COLOURS = {
    "weights": BLUE, "optimizer states": TEAL, "gradients": PURPLE, "activations": ORANGE, "loss": GREEN,
    "block": OCHRE, "cache": PINK, "prompt": GREY,
}  # fmt: skip
MIN_LABEL = 0.05  # of the longest bar: a smaller part has no room for its size


def print_report(args: argparse.Namespace) -> None:
    """Prints the facts and the memory of the model of a command line, and draws its picture, if it asks for one."""
    dtype = args.dtype and getattr(torch, args.dtype)
    described = describe(args.model, dtype=dtype, revision=args.revision)
    print_line(args.model)
    attention = "attention", attention_line(described, dtype)
    memory = memory_of(described, args)
    for_gpu = dict(for_gpu_lines(described, args)) if args.for_gpu else {}
    for label, value in (*fact_lines(described), attention, *memory_lines(described, args, memory), *for_gpu.items()):
        print_line(f"  {label:12} {value}".rstrip())
    names = "step", *ways_of(described.model)
    planned = {"for_gpu": dict(zip(names, for_gpu.values(), strict=True))} if for_gpu else {}
    args.console.record(record_of(args.model, described, memory) | planned)
    if args.plot is not None:
        draw_memory(memory.peaks, args.plot, f"{args.model}: {setting_of(described, args)}")
        print_line(f"  {'plot':12} {args.plot}")


def fact_lines(described: Description) -> Iterator[tuple[str, str]]:
    """(label, value) of the model's shape, parameters and files."""
    config, count, files = described.model.config, count_parameters(described.model), described.files
    query_heads = counted(config.num_attention_heads, "query head")
    mixers = [block.mixer for block in decoder_blocks(described.model)]
    head_dim = next((mixer.head_dim for mixer in mixers if mixer.score_width), config.head_dim)
    heads = f"{query_heads}, {counted(config.num_key_value_heads, 'key-value head')} of size {head_dim}"
    yield "family", config.raw["model_type"]
    layers = counted(config.num_hidden_layers, "layer")
    yield "shape", f"{layers}, hidden size {config.hidden_size:,}, {heads}"
    active = f", {count.active:,} active" if isinstance(config, MoEConfig) else ""
    yield "parameters", f"{count.total:,}{active}, {count.embedding:,} of them embeddings"
    yield "vocabulary", f"{config.vocab_size:,}; positions {config.max_position_embeddings:,}"
    yield "dtype", str(described.dtype).removeprefix("torch.")
    yield "files", f"{len(files)}, {byte_size(sum(size or 0 for size in files.values()))}" if files else "none"
    for name, size in files.items():
        yield "", f"{name}  {'missing' if size is None else byte_size(size)}"


def attention_line(described: Description, dtype: torch.dtype | None) -> str:
    """What computes the attention of training on this machine, and what would be faster to install."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)  # as training chooses it
    implementation = described.model.attention_implementation(device, dtype)
    return f"in training, {str(dtype).removeprefix('torch.')} on {device.type}: {implementation}"


class Memory(NamedTuple):
    """training: of full training and of adapters, by what it is called. generating: of generation."""

    training: dict[str, TrainingMemory]
    generating: InferenceMemory

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Maps each use to the parts that its peak has."""
        training = {label: at_peak(step) for label, step in self.training.items()}
        return training | {"generate": dict(vars(self.generating))}


def at_peak(step: TrainingMemory) -> dict[str, int]:
    """The parts that are in memory at the peak of a step on one device."""
    at_start = step.backward_start >= step.backward_end
    moving = {"activations": step.activations, "loss": step.loss}
    if not at_start:
        moving = {"gradients": step.gradients, "block": step.block}
    return {"weights": step.weights, "optimizer states": step.optimizer_states, **moving}


def setting_of(described: Description, args: argparse.Namespace) -> str:
    return f"{args.batch_size or 1} × {args.sequence_length} tokens, {described.dtype}".replace("torch.", "")


def record_of(name: str, described: Description, memory: Memory) -> dict[str, Any]:
    """What --json prints: numbers of parameters and bytes, where the report has words."""
    config = described.model.config
    return {
        "model": name, "family": config.raw["model_type"], "layers": config.num_hidden_layers,
        "parameters": dict(vars(count_parameters(described.model))), "memory": memory.peaks,
        "dtype": str(described.dtype).removeprefix("torch."), "files": dict(described.files),
    }  # fmt: skip


def memory_of(described: Description, args: argparse.Namespace) -> Memory:
    batch = args.batch_size or 1, args.sequence_length, described.dtype
    needs = partial(
        training_memory,
        checkpointed_blocks=0 if args.activation_checkpointing in (None, "none") else len(described.model.blocks),
        kept_tensors=None if args.activation_checkpointing == "selective" else 0,
    )
    ways = ways_of(described.model)
    generating = inference_memory(stored_model(described, ways[0]), *batch)  # the first way's weights are as loaded
    steps = {}
    for way in ways:
        model = stored_model(described, way)
        if way != "full":
            add_lora(model, rank=args.lora_rank)
        steps["train" if way == "full" else way] = needs(model, *batch)
    return Memory(steps, generating)


def stored_model(described: Description, way: str) -> CausalLM:
    """A copy of the model in its dtype, quantised if the way of training is QLoRA."""
    model = copy.deepcopy(described.model).to(described.dtype)
    if way == "QLoRA":
        quantise(model, "nf4")
    return model


def memory_lines(described: Description, args: argparse.Namespace, memory: Memory) -> Iterator[tuple[str, str]]:
    """(label, value) of the memory for full training, LoRA training and generation."""
    checkpointing = "no" if args.activation_checkpointing in (None, "none") else args.activation_checkpointing
    yield "memory", f"for {setting_of(described, args)}, {checkpointing} activation checkpointing"
    for label, step in memory.training.items():
        at_loss = f"activations {memory_size(step.activations)} + loss {memory_size(step.loss)}"
        at_end = f"gradients {memory_size(step.gradients)} + block {memory_size(step.block)}"
        lasting = f"weights {memory_size(step.weights)} + optimizer states {memory_size(step.optimizer_states)}"
        yield f"  {label}", f"{memory_size(step.peak):>10} = {lasting} + max({at_loss}, {at_end})"
    parts = " + ".join(f"{name} {memory_size(size)}" for name, size in vars(memory.generating).items())
    yield "  generate", f"{memory_size(memory.generating.peak):>10} = {parts}"


def for_gpu_lines(described: Description, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(label, value) of each way of training on the GPUs of --for-gpu."""
    world, length = planned_world(args.for_gpu), args.sequence_length
    rows = args.batch_size or rows_of_step(length, world)
    devices = f"{world.size} x {device_name(world)}, {memory_size(device_memory(world))}"
    yield "for a GPU", f"{devices}, for steps of {rows} × {length} tokens, bfloat16"
    for training in trainings(described.model, length, rows, args.lora_rank, args.activation_checkpointing):
        yield f"  {training.way}", verdict(described.model, args.model, training, world)


def draw_memory(peaks: Mapping[str, Mapping[str, int]], picture: Path, title: str) -> None:
    """Writes a PNG, SVG or PDF, by the picture's name, with one bar for each use.

    peaks: by use, the bytes of the parts that its peak has. Raises InputError without matplotlib, and where the picture
    cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InputError("info --plot: matplotlib is missing; pip install matplotlib") from error
    longest = max(sum(parts.values()) for parts in peaks.values())
    with matplotlib.rc_context(PLOT_STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(10, 1.3 + 0.75 * len(peaks)), layout="constrained")
        axes = figure.subplots()
        for row, parts in enumerate(peaks.values()):
            begin = 0
            for name, size in parts.items():
                axes.barh(row, size, left=begin, height=0.6, color=PART_COLOURS[name], edgecolor="white", linewidth=1)
                if size > MIN_LABEL * longest:
                    axes.text(begin + size / 2, row, memory_size(size), ha="center", va="center", color="white")
                begin += size
            axes.text(begin, row, f"  {memory_size(begin)}", va="center", color=INK, fontweight="bold")
        axes.set_yticks(range(len(peaks)), [*peaks], fontsize=10, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.12)
        step = 2 ** math.floor(math.log2(longest / 4))  # bytes, so that sizes are round
        ticks = [*range(0, round(longest * 1.1), step)]
        axes.set_xticks(ticks, [memory_size(size) for size in ticks])
        axes.set_title(title, fontsize=12, fontweight="bold")
        used = (name for name in PART_COLOURS if any(parts.get(name) for parts in peaks.values()))
        handles = [Patch(color=PART_COLOURS[name], label=name) for name in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=8)
        try:
            figure.savefig(picture, dpi=140)
        except (OSError, ValueError) as error:
            raise InputError(f"--plot {picture}: cannot be written: {error}") from error
