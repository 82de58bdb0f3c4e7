"""The plan of a run: parameters, data, tokens, steps, epochs, FLOPs and memory, known before anything is allocated.

`--dry-run` prints it, and every run begins with its first line.
"""

import functools
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ligermodels.aliases import flag_of
from ligermodels.distributed import World, gather_objects, ranks_of_host
from ligermodels.errors import InputError
from ligermodels.layers.checkpointing.host_memory import available_host_memory
from ligermodels.layers.checkpointing.offloaded_weights import offloaded_bytes
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.blocks import CROSS_ENTROPY, HeadOp
from ligermodels.memory.model import (
    Parameters,
    TrainingMemory,
    count_parameters,
    elements,
    state_bytes,
    trained_parameters,
    training_memory,
)
from ligermodels.training.checkpoints.files import committed_steps
from ligermodels.training.data.opening import DocumentLengths
from ligermodels.training.data.rows.run_rows import split_global_batch
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.offloaded import bytes_where_offloaded
from ligermodels.training.parallel.activation_checkpointing import (
    Checkpointing,
    MemoryEstimator,
    device_memory,
    device_name,
)
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.planning.defaults import TORCH_DTYPES
from ligermodels.training.planning.image_load import NO_IMAGES, ImageLoad
from ligermodels.training.reporting.flops import flops_per_token
from ligermodels.training.run.folder import CHECKPOINTS
from ligermodels.training.settings.config import RL, SUPERVISED, UNIT_SETTINGS, RunConfig
from ligermodels.units import counted, memory_size

MANY_EPOCHS = 10
OFFLOADED = {  # by the values of --offload
    "optimizer": "optimizer states",
    "activations": "inputs of blocks",
    "weights": "quantised weights",
}


@dataclass(frozen=True)
class DataSummary:
    """What a plan says of the data of a run.

    rows counts the training data. passes has, for each data source, the number of rows after which all of its own were
    seen once. lengths describes the training documents; it is None for groups. images are what they add to a step.
    """

    description: str
    rows: int
    passes: Sequence[float]
    validation_rows: int
    lengths: DocumentLengths | None
    images: ImageLoad = NO_IMAGES


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run that is about to start.

    micro_batch_size counts the sequences of a forward pass of a rank. tokens_per_step is over all ranks, and about
    right for groups. chosen has a line for each setting that was not given. dtype is that of computation. attention
    names what computes it; it is empty for a GPU that this machine need not have. checkpointing says which of the
    model's `blocks` have activation checkpointing. memory is that of one rank. phases has the peak bytes of a rank in
    each phase of the run. facts and advice are further lines and warnings of the objective. flops are per token, with
    those of the images. positions is the model's max_position_embeddings. checkpoint is about the bytes of one
    checkpoint.
    """

    config: RunConfig
    world: World
    parameters: Parameters
    trained: int
    data: DataSummary
    micro_batch_size: int
    tokens_per_step: int
    chosen: Sequence[str] = ()
    dtype: torch.dtype
    attention: str
    flops: int
    memory: TrainingMemory
    phases: Mapping[str, int]
    facts: Mapping[str, str]
    advice: Sequence[str] = ()
    checkpointing: Checkpointing
    blocks: int
    positions: int
    checkpoint: int

    @property
    def total(self) -> int | None:
        """Bytes of the GPU's memory; None for a CPU, which other processes share."""
        return device_memory(self.world) if self.world.device.type == "cuda" else None

    @property
    def accumulated(self) -> int:
        """Micro-batches per step of a rank: gradient accumulation."""
        return split_global_batch(self.config.units, self.micro_batch_size, self.world)[0]

    @property
    def epochs(self) -> list[float]:
        """The epochs of each data source. Sources without mixture weights count as one."""
        return [self.config.steps * self.config.units / rows for rows in self.data.passes]

    @property
    def title(self) -> str:
        """The model, and the adapter that is continued on it."""
        return self.config.title if self.config.adapter is None else f"{self.config.adapter} on {self.config.title}"

    @property
    def line(self) -> str:
        """The whole run in one line."""
        trained = "" if self.trained == self.parameters.total else f", {self.trained:,} of them trained"
        return (
            f"{self.title}: {self.parameters.total:,} parameters{trained}; {self.training_data}; "
            f"{self.steps}; {self.step}{self.placement}"
        )

    @property
    def placement(self) -> str:
        """What a step does to fit into memory."""
        return placement_text(self.config, self.checkpointing.blocks, self.blocks)

    @property
    def training_data(self) -> str:
        return f"{self.data.description}: {counted(self.data.rows, self.unit)}"

    @property
    def unit(self) -> str:
        """What the data are counted in."""
        return "row" if self.config.objective in SUPERVISED else UNIT_SETTINGS[self.config.objective].removesuffix("s")

    @property
    def steps(self) -> str:
        return f"{counted(self.config.steps, 'step')} = {' + '.join(map(as_text, self.epochs))} epochs"

    @property
    def step(self) -> str:
        devices = f"{self.world.size} x {self.world.device.type}"
        if self.world.context > 1:
            devices += f", each row on {self.world.context} of them"
        if self.config.objective not in SUPERVISED:
            rows = f"in rows of {self.config.sequence_length:,} tokens on {devices}"
            return f"{counted(self.config.units, self.unit)} a step, about {self.tokens_per_step:,} tokens, {rows}"
        batches = "1 batch" if self.accumulated == 1 else f"{self.accumulated} batches"
        return (
            f"{self.tokens_per_step:,} tokens a step = {batches} of {self.micro_batch_size} x "
            f"{self.config.sequence_length} on {devices}"
        )

    def text(self) -> str:
        return "\n".join([self.title, *(f"  {label:13} {value}" for label, value in self.table())])

    def table(self) -> Iterator[tuple[str, str]]:
        count = self.parameters
        active = f", {count.active:,} active" if count.active < count.total else ""
        yield "parameters", f"{count.total:,}{active}, {count.embedding:,} of them embeddings"
        yield "trained", f"{self.trained:,}, {self.trained / count.total:.2%}"
        yield "data", self.training_data
        yield (
            "validation",
            f"{counted(self.data.validation_rows, self.unit)}, every {counted(self.config.eval_every, 'step')}",
        )
        yield "a step", self.step
        tokens = self.config.steps * self.tokens_per_step
        yield "the run", f"{self.steps}, {tokens:,} tokens"
        yield "compute", f"{self.flops:.3g} FLOPs a token, {self.flops * tokens:.3g} in all"
        if self.data.images.tokens:
            of_flops = self.data.images.flops / self.flops
            share = f"{self.data.images.share:.0%} of the tokens of the rows, {of_flops:.0%} of the FLOPs"
            yield "images", f"{share}; at most {self.data.images.most_patches:,} patches in a row"
        if self.config.packing and self.attention:
            yield "attention", self.attention
        yield from self.facts.items()
        recomputed, kept = self.checkpointing
        checkpointed = f", {recomputed} of {self.blocks} blocks checkpointed" if recomputed else ""
        checkpointed += f" with {kept} results kept" if kept else ""
        yield "memory", f"of a {device_name(self.world)}, not all at the same time{checkpointed}"
        for part, size in self.memory.parts.items():
            if size:
                yield f"  {part}", f"{memory_size(size):>10}"
        total = self.total
        for phase, size in self.phases.items():
            yield (
                f"  peak{f', {phase}' if len(self.phases) > 1 else ''}",
                f"{memory_size(size):>10}" + (f" of {memory_size(total)}" if total else ""),
            )
        if self.memory.host:
            inputs, every = memory_size(self.memory.offloaded_inputs), self.memory.offloads_every
            blocks = "every checkpointed block" if every == 1 else f"one of {every} checkpointed blocks"
            of_them = f", {inputs} of them the inputs of {blocks}" if every else ""
            if self.memory.offloaded_weights:
                of_them += f", {memory_size(self.memory.offloaded_weights)} of them quantised weights"
            known = self.world.planned_for is None
            limit = f"of {memory_size(available_host_memory())}" if known else "that the host must have for each rank"
            yield "  host memory", f"{memory_size(self.memory.host):>10} {limit}{of_them}"
        if self.cut:
            yield "cut", self.cut
        for line in self.chosen:
            yield "chosen", line
        for warning in self.warnings:
            yield "warning", warning

    @property
    def notes(self) -> list[str]:
        """What a user may not expect: settings that were chosen, and documents that are cut."""
        facts = [f"{label}: {line}" for label, line in self.facts.items()]
        return [*facts, *(f"chosen: {line}" for line in self.chosen), *([f"cut: {self.cut}"] if self.cut else [])]

    @property
    def cut(self) -> str:
        """How many documents are longer than a row; empty for none."""
        lengths, length = self.data.lengths, self.config.sequence_length
        if lengths is None or not lengths.cut:
            return ""
        return (
            f"{lengths.cut:,} of {counted(lengths.documents, 'document')} are longer than --sequence-length {length} "
            f"and are cut into pieces; {lengths.holds_most} holds 99 % of them whole"
        )

    @property
    def exported(self) -> int:
        """Bytes of the export on the disk, about."""
        if self.config.exports_adapter:
            return self.trained * torch.float32.itemsize
        return self.parameters.total * self.dtype.itemsize

    @property
    def checkpoints(self) -> int:
        """The most checkpoints on the disk at a time. A new one is complete before an old one is removed."""
        config = self.config
        if config.checkpoint_every == 0:
            return 0
        saves = math.ceil(config.steps / (config.checkpoint_every or 1))  # by time: perhaps after every step
        if config.best_checkpoint:
            saves = min(config.steps, saves + math.ceil(config.steps / config.eval_every))
        return min(saves, max(2, config.keep_checkpoints) + config.best_checkpoint)

    @property
    def warnings(self) -> list[str]:
        return list(self.find_warnings())

    def find_warnings(self) -> Iterator[str]:
        config, fewest, most = self.config, min(self.epochs), max(self.epochs)
        if fewest < 1:
            seen = f"all are seen once by --steps {math.ceil(max(self.data.passes) / config.units)}"
            yield f"{as_text(fewest)} epochs: --steps {config.steps} does not see all {self.unit}s; {seen}"
        if most > MANY_EPOCHS:
            rows = f"every {self.unit} is" if len(self.data.passes) == 1 else f"{self.unit}s of one source are"
            yield f"{as_text(most)} epochs: {rows} repeated as often; watch the validation loss"
        if config.warmup >= config.steps:
            yield f"--warmup {config.warmup} is all of --steps {config.steps}"
        flag = "sequence_length" if config.objective in SUPERVISED else "max_length"
        if config.objective not in RL and getattr(config, flag) > self.positions:
            made_for = f"the model's max_position_embeddings, {self.positions}"
            yield f"{flag_of(flag)} {getattr(config, flag)} is more than {made_for}"
        if self.world.device.type == "cpu":
            yield from self.bfloat16_warnings()
        total = self.total
        for phase, size in self.phases.items():
            if total and size > total:
                where = f"{phase}: " if len(self.phases) > 1 else ""
                yield f"{where}{memory_size(size)} is more than the GPU has; {', '.join(self.remedies())} or more ranks"
        yield from self.advice
        if lacking := self.lacking_host_memory():
            yield lacking
        if self.world.planned_for is None:  # neither the memory nor the disk of its host is known
            yield from self.host_memory_warnings()
            yield from self.disk_warnings()

    def bfloat16_warnings(self) -> Iterator[str]:
        """Warns of what is slow in bf16 on a CPU."""
        config = self.config
        if config.dtype == "bfloat16" and not computes_in_bfloat16():
            yield "--dtype bfloat16: this CPU has no bf16 instructions and is many times slower with it; leave it out"
        if config.dtype != config.param_dtype == "bfloat16" and not config.with_lora:
            slow = "a CPU converts them to fp32 and back in each step, which is slow; leave it out"
            yield f"--param-dtype bfloat16: {slow}"

    def remedies(self) -> Iterator[str]:
        """What makes a step smaller that is not chosen by itself, with most effect first."""
        config = self.config
        checkpointing = "auto" if self.total else "full"  # on a CPU "auto" is for nothing
        if config.activation_checkpointing not in (checkpointing, "full"):
            yield f"use --activation-checkpointing {checkpointing}"
        if not config.with_lora:
            yield "use --lora-rank 16"
        if config.quantize is None and not config.has_new_weights:
            yield "with LoRA --quantize nf4"
        yield f"lower {'--micro-batch-size, ' * bool(config.micro_batch_size)}--sequence-length"

    def lacking_host_memory(self) -> str:
        """What a run on CPUs lacks, and the remedy; empty for one that fits into the memory of the host. The same on
        every rank."""
        if self.world.device.type != "cpu":
            return ""
        available, needed = min(gather_objects(available_host_memory())), ranks_of_host() * self.needed
        if needed <= available:
            return ""
        remedies = [*self.remedies(), "or take a GPU"]
        size = f"a smaller --size than {self.config.size}, " if self.config.has_new_weights else ""
        return (
            f"the run takes {memory_size(needed)} of host memory, of which {memory_size(available)} are available; "
            f"{size}{', '.join(remedies)}"
        )

    @property
    def needed(self) -> int:
        """Bytes of a rank in the phase that takes most, with what is offloaded to the host."""
        return max(self.phases.values()) + self.memory.host

    def host_memory_warnings(self) -> Iterator[str]:
        """Warns where the host has no room for the copy that each rank makes of its part of a checkpoint."""
        ranks = ranks_of_host()
        copies = ranks * self.checkpoint // dp_shard_size(self.world, self.config.dp_replicate)
        offloaded = ranks * self.memory.host
        if self.world.device.type == "cuda" and self.checkpoints and copies + offloaded > host_memory():
            beside = f" beside {memory_size(offloaded)} that are offloaded" if offloaded else ""
            yield (
                f"a checkpoint is copied to host memory first, {memory_size(copies)}{beside}, but this host has "
                f"{memory_size(host_memory())}; --checkpoint-every 0 saves none"
            )

    def disk_warnings(self) -> Iterator[str]:
        """Warns where the disk is too full, beyond what a resumed run has on it already."""
        config, number = self.config, self.checkpoints
        folder, free = free_space(config.output or Path())
        there = len(committed_steps(config.resume / CHECKPOINTS)) if config.resume else 0
        exported = 0 if config.no_export else self.exported
        stay = min(number, config.keep_checkpoints + config.best_checkpoint)
        needed = max(number * self.checkpoint, stay * self.checkpoint + exported)
        if needed - there * self.checkpoint <= free:
            return
        most = "up to " if number > 1 and (config.checkpoint_every is None or config.best_checkpoint) else ""
        parts = [f"{most}{counted(number, 'checkpoint')} of {memory_size(self.checkpoint)}"] * bool(number)
        parts += [f"the export of {memory_size(exported)}"] * bool(exported)
        yield f"no room for {' and '.join(parts)}: {folder} has {memory_size(free)}; make room there"


def make_plan(
    model: CausalLM, config: RunConfig, world: World, data: DataSummary, memory: TrainingMemory, **known: Any
) -> Plan:
    """Makes the plan of a run. The model has its LoRA and is not sharded yet; it may be on the meta device. known are
    the fields of the plan that are not computed here."""
    dtype = TORCH_DTYPES[config.dtype]
    trained = trained_parameters(model)
    states = memory.offloaded_states or memory.optimizer_states * dp_shard_size(world, config.dp_replicate)
    return Plan(
        config=config, world=world, data=data, memory=memory, dtype=dtype, blocks=len(model.blocks),
        parameters=count_parameters(model), trained=elements(trained), positions=model.config.max_position_embeddings,
        attention="" if world.planned_for else model.attention_implementation(world.device, dtype),
        flops=round(flops_per_token(model, config.sequence_length) + data.images.flops),
        checkpoint=sum(parameter.nbytes for parameter in trained) + states, **known,
    )  # fmt: skip


def placement_text(config: RunConfig, checkpointed: int, blocks: int) -> str:
    """What a step does to fit into memory, of a model with so many blocks; empty for nothing."""
    parts = {
        "8-bit moments": config.optimizer == "adamw8bit",
        "the update in the backward pass": config.optimizer_in_backward,
        f"{' and '.join(OFFLOADED[name] for name in config.offload)} in host memory": config.offload,
        f"{checkpointed} of {blocks} blocks checkpointed": checkpointed,
    }
    named = [part for part, there in parts.items() if there]
    return f", with {', '.join(named)}" if named else ""


def refuse_without_host_memory(plan: Plan) -> None:
    """Raises InputError for a run on CPUs that the system would end when the memory of the host is used up."""
    if lacking := plan.lacking_host_memory():
        raise InputError(f"--model {plan.config.model}: {lacking}")


def as_text(epochs: float) -> str:
    """0.12, 1.5, 20."""
    return f"{epochs:.2g}" if epochs < 1 else f"{epochs:.{1 if epochs < MANY_EPOCHS else 0}f}"


def free_space(folder: Path) -> tuple[Path, int]:
    """The nearest existing folder among `folder` and its parents, and the bytes that are free there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there, shutil.disk_usage(there).free


def host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def computes_in_bfloat16() -> bool:
    """Whether this CPU has bf16 instructions: AVX512_BF16 (AMX implies it) or Arm's.

    Without them torch is slower in bf16 than in float32; without AVX512, ten times slower and more.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class StateBytes(NamedTuple):
    """Bytes of an optimizer's states, and where they are if they are offloaded: on the device and on the host."""

    all: int
    on_device: int
    on_host: int


def state_sizes(optimizer: AdamW) -> StateBytes:
    """Creates the states of an optimizer, whose model is on the meta device, and counts their bytes."""
    optimizer.create_states()
    return StateBytes(state_bytes(optimizer), *bytes_where_offloaded(optimizer))


def memory_needs(
    model: CausalLM, states: StateBytes, config: RunConfig, world: World, dtype: torch.dtype, beside: int,
    micro_batches: Callable[[int], int], row_patches: int = 0, head_op: HeadOp = CROSS_ENTROPY,
) -> MemoryEstimator:  # fmt: skip
    """The memory of a step of this run as a function of the settings that may still change.

    model: on the meta device, unsharded. states: of its optimizer. beside: bytes of a rank that stay beside the model.
    micro_batches: how many of them a step has, by their rows. row_patches: the most of the images of a row. head_op: as
    that of `training_memory`. The result takes the micro-batch size as `batch_size`.
    """
    on_device, on_host, room, offload_weights = states.all, 0, 0.0, "weights" in config.offload
    # A checkpoint copies weights and states to the host, so that it can be written beside the next steps.
    copied = (sum(p.nbytes for p in trained_parameters(model)) + on_device) // dp_shard_size(world, config.dp_replicate)
    if "optimizer" in config.offload:
        _, on_device, on_host = states
    if "activations" in config.offload:
        free = min(gather_objects(available_host_memory() // ranks_of_host()))
        needed = copied + on_host + offloaded_bytes(model.blocks)[1] * offload_weights
        room = max(0, free - needed) if world.planned_for is None else math.inf  # its host is not known
    estimate = functools.partial(
        training_memory, model, sequence_length=config.sequence_length, dtype=dtype,
        shards=dp_shard_size(world, config.dp_replicate), optimizer_states=on_device, offloaded_states=on_host,
        room_for_inputs=room, beside=beside, context=world.context, expert_ranks=config.expert_parallel,
        head_op=head_op, low_memory_loss=config.low_memory_loss, step_in_backward=config.optimizer_in_backward,
        offload_weights=offload_weights,
    )  # fmt: skip
    return lambda *, batch_size, **options: estimate(
        batch_size, patches=batch_size * row_patches, micro_batches=micro_batches(batch_size), **options
    )
