"""`ligermodels info`: shows a model's parameters, files and memory, without loading its weights."""

import argparse
from collections.abc import Iterator

import torch

from ligermodels.cli.flags import Commands, add_command, positive
from ligermodels.cli.parsing import add_dtype, add_revision, print_line
from ligermodels.configs.features import MoEConfig
from ligermodels.hub.description import Description, describe
from ligermodels.layers.lora_targets import add_lora
from ligermodels.memory import count_parameters, decoder_blocks, inference_memory, training_memory
from ligermodels.units import byte_size, counted, memory_size


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "info", run, "show a model's parameters, its files, and the memory for training and generation",
        "Qwen/Qwen3-8B --batch-size 8 --sequence-length 4096",
    )  # fmt: skip
    parser.add_argument("model", help="a folder, a Hub id, or a preset such as qwen2:tiny; no weights are downloaded")
    parser.add_argument("--batch-size", type=positive, default=1, help="rows per batch")
    parser.add_argument("--sequence-length", type=positive, default=2048, help="tokens per row")
    add_dtype(parser, "dtype of weights, gradients, AdamW states and activations (default: that of the weights)")
    parser.add_argument(
        "--activation-checkpointing", choices=["none", "full"], default="none", help="full: keep only block inputs"
    )
    parser.add_argument("--lora-rank", type=positive, default=16, help="rank of LoRA on all projections")
    add_revision(parser)


def run(args: argparse.Namespace) -> None:
    described = describe(args.model, dtype=args.dtype, revision=args.revision)
    print_line(args.model)
    attention = "attention", attention_line(described, args.dtype)
    for label, value in (*fact_lines(described), attention, *memory_lines(described, args)):
        print_line(f"  {label:12} {value}".rstrip())


def fact_lines(described: Description) -> Iterator[tuple[str, str]]:
    """(label, value) of the model's shape, parameters and files."""
    config, count, files = described.model.config, count_parameters(described.model), described.files
    query_heads = counted(config.num_attention_heads, "query head")
    head_dim = decoder_blocks(described.model)[0].self_attn.head_dim
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
    implementation = decoder_blocks(described.model)[0].self_attn.implementation(device, dtype)
    return f"in training, {str(dtype).removeprefix('torch.')} on {device.type}: {implementation}"


def memory_lines(described: Description, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(label, value) of the memory for full training, LoRA training and generation."""
    batch = args.batch_size, args.sequence_length, described.dtype
    model = described.model.to(described.dtype)
    checkpointing = args.activation_checkpointing == "full"
    checkpointed = len(model.blocks) if checkpointing else 0
    setting = f"{args.batch_size} × {args.sequence_length} tokens, {described.dtype}".replace("torch.", "")
    yield "memory", f"for {setting}, {'full' if checkpointing else 'no'} activation checkpointing"
    generating = inference_memory(model, *batch)
    training = training_memory(model, *batch, checkpointed_blocks=checkpointed)
    add_lora(model, rank=args.lora_rank)
    adapting = training_memory(model, *batch, checkpointed_blocks=checkpointed)
    for label, step in (("  train", training), ("  LoRA", adapting)):
        at_loss = f"activations {memory_size(step.activations)} + loss {memory_size(step.loss)}"
        at_end = f"gradients {memory_size(step.gradients)} + block {memory_size(step.block)}"
        lasting = f"weights {memory_size(step.weights)} + optimizer states {memory_size(step.optimizer_states)}"
        yield label, f"{memory_size(step.peak):>10} = {lasting} + max({at_loss}, {at_end})"
    parts = " + ".join(f"{name} {memory_size(size)}" for name, size in vars(generating).items())
    yield "  generate", f"{memory_size(generating.peak):>10} = {parts}"
