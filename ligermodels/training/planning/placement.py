"""Placement: how a step fits into the memory of its devices, chosen together: the micro-batch size, the moments of the
optimizer, its step in the backward pass, where its states are, and what activation checkpointing recomputes.

Settings that are given stay as they are. Of all others the placement is the fastest that fits, by the plan of the
memory (memory/) and the time of the step. Where several take about as long, it is the one that changes least: of 8-bit
moments, clipping by a running norm and offloading none is for nothing.

The time of a step is the sum of its parts, about: products, recomputation, accumulation of gradients, the optimizer,
copies to and from host memory, and what FSDP2 sends. Of steps of Llama-3-8B on H200s it is within 3 % of what was
measured (tests/training/planning/test_step_time.py).

It depends on the kind of the devices, not on what is free on them at the moment. What depends on the host's free memory
or changes the result is a setting of the run from then on, so that a resumed run takes the same. On a CPU nothing is
chosen.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from ligermodels.distributed import World
from ligermodels.layers.checkpointing.host_memory import available_host_memory
from ligermodels.layers.checkpointing.kept_tensors import choose_kept
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory, decoder_blocks, trained_parameters
from ligermodels.training.parallel.activation_checkpointing import (
    Checkpointing,
    MemoryEstimator,
    checkpointing_of,
    device_memory,
    device_name,
    usable_share,
)
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.planning.contradictions import misfit_of_optimizer_in_backward
from ligermodels.training.planning.defaults import Choice
from ligermodels.training.reporting.flops import flops_per_token, peak_flops_of_gpu, recomputed_flops
from ligermodels.training.settings.config import FIELDS, RunConfig
from ligermodels.units import memory_size

# What a step reaches of the peak FLOP/s, recomputation included: Llama-3-8B, 8 x 2048, H200, 2026-11-22 to 26.
UTILISATION = 0.63
FP32_OF_BF16 = 1 / 16  # the peak of fp32 products: of an H100 67 of 989 TFLOP/s, of an A100 19.5 of 312
# Bytes a second that a copy in device memory reads and writes. H200: 2026-11-20 to 26. H100: of the 3.35 TB/s of its
# data sheet the same part, 89 %. Others: FLOPs of the peak a byte, between those of an A100, 170, and of an H100, 330.
COPY_RATES = {"NVIDIA H200*": 4.27e12, "NVIDIA H100 80GB HBM3": 3.0e12}
FLOPS_PER_BYTE = 250
# Bytes a second to the host, and at the same time from it. PCIe 5: from the 42 GB of Llama-3-8B's states each way,
# 11,518 tokens/s on an H100, 2026-11-27. Others have PCIe 4.
HOST_RATES = {"NVIDIA [HB][0-9]00*": 46e9}
OTHER_HOST_RATE = 23e9
# Bytes a second that a rank receives from the others of its host, over NVLink: an all-reduce of 1 GiB on two H100s,
# 2026-11-13. Others have PCIe 4.
LINK_RATES = {"NVIDIA [HB][0-9]00*": 330e9}
OTHER_LINK_RATE = 20e9
# What a micro-batch takes beside its tokens, in tokens: gemma-4-e4b, 4 x 2048 beside 2 x 2048, H200, 2026-11-26.
TOKENS_OF_MICRO_BATCH = 200
# The host's time for a block, forward and backward: SmolLM2-135M, 57 ms a step of 30 blocks, H200, 2026-11-27.
HOST_SECONDS_OF_BLOCK = 1.9e-3
BF16_BYTES = 2
SHARE_OF_8_BITS = 0.77  # of the copy rate that 8-bit AdamW reaches, Llama-3-8B, H200, 2026-11-26; AdamW 0.97
MOST_TOKENS = {"cuda": 2**14, "cpu": 2**12}  # of a micro-batch; more are not faster
NEARLY = 1.02  # times that differ by less are equal: the plan of the time is within 2 %


@dataclass(frozen=True)
class Rates:
    """What a device does a second. flops: in the products of a step. copy: bytes of its memory read and written. host:
    bytes copied to the host, and at the same time from it. link: bytes received from the other ranks."""

    flops: float
    copy: float
    host: float
    link: float


def device_rates(name: str, dtype: str) -> Rates:
    """The rates of a GPU by its device name, computing in `dtype`. An unknown one has the proportions of others."""
    half = peak_flops_of_gpu(name, "bfloat16") or peak_flops_of_gpu("NVIDIA H100 80GB HBM3", "bfloat16")
    assert half is not None
    peak = half * FP32_OF_BF16 if dtype == "float32" else peak_flops_of_gpu(name, dtype) or half
    copy, host, link = (
        next((rate for pattern, rate in known.items() if fnmatchcase(name, pattern)), other)
        for known, other in (
            (COPY_RATES, half / FLOPS_PER_BYTE), (HOST_RATES, OTHER_HOST_RATE), (LINK_RATES, OTHER_LINK_RATE),
        )
    )  # fmt: skip
    return Rates(UTILISATION * peak, copy, host, link)


class StepTime:
    """The time of a model's step on one rank."""

    def __init__(self, model: CausalLM, sequence_length: int, rates: Rates, shards: int = 1) -> None:
        """Reads a model, which is unsharded, on any device, and is to be sharded over so many ranks."""
        self.rates, self.blocks, self.length = rates, model.blocks, sequence_length
        whole = sum(parameter.nbytes for parameter in trained_parameters(model))
        self.trained = whole / shards
        # Of a micro-batch: weights are gathered in bf16 before the forward and again before the backward pass, and the
        # gradients, in the dtype of the parameters, summed. It takes its time: products beside it are slower.
        gathered = sum(min(parameter.itemsize, BF16_BYTES) * parameter.numel() for parameter in model.parameters())
        self.sent = (2 * gathered + whole) * (shards - 1) / shards
        self.flops = flops_per_token(model, sequence_length)
        text = decoder_blocks(model)
        towers = [0.0] * (len(self.blocks) - len(text))  # their rows are patches, which are not counted here
        self.recomputed = [*towers, *(recomputed_flops(block, sequence_length) for block in text)]

    def seconds(
        self, memory: TrainingMemory, tokens: int, micro_batches: int, checkpointed_blocks: int, kept_tensors: int, *,
        in_backward: bool, in_8_bits: bool,
    ) -> float:  # fmt: skip
        """The seconds of a step with this plan of the memory. tokens are those of a micro-batch. in_backward and
        in_8_bits describe the optimizer."""
        rates, trained = self.rates, self.trained
        products = self.flops * (tokens + TOKENS_OF_MICRO_BATCH) / rates.flops
        again = tokens * self.recomputed_by(checkpointed_blocks, kept_tensors) / rates.flops
        fetched = 2 * memory.offloaded_weights / rates.host  # beside the products, forward and backward
        of_host = len(self.blocks) * HOST_SECONDS_OF_BLOCK
        micro_batch = max(products + again, of_host, fetched) + self.sent / rates.link
        accumulation = 3 * trained * (micro_batches - 1) / rates.copy  # two are read, and their sum is written
        states = memory.optimizer_states + memory.offloaded_states
        # Weights, states and, for their norm too, gradients are read; weights and states are written.
        update = (4 * trained + 2 * states / (SHARE_OF_8_BITS if in_8_bits else 1)) / rates.copy
        hidden = micro_batch - products / 3 if in_backward else 0.0  # beside the backward pass
        copies = max(0.0, memory.offloaded_states / rates.host - hidden)
        copies += 2 * memory.offloaded_states / rates.copy  # device memory has less time for all else
        return micro_batches * micro_batch + accumulation + update + copies

    def recomputed_by(self, checkpointed_blocks: int, kept_tensors: int) -> float:
        """The FLOPs per token that are computed again."""
        kept = choose_kept(self.blocks[:checkpointed_blocks], kept_tensors, self.length)
        saved = sum(tensor.flops for tensors in kept for tensor in tensors)
        return max(0.0, sum(self.recomputed[:checkpointed_blocks]) - saved)


NO_CHECKPOINTING = Checkpointing(0, 0)


@dataclass(frozen=True)
class Placement:
    """How a step fits into memory.

    optimizer_state_dtype is None for that of the parameters. checkpointing is what a device needs while nothing else is
    on it.
    """

    micro_batch_size: int
    optimizer: str
    optimizer_state_dtype: str | None
    optimizer_in_backward: bool
    offload: tuple[str, ...]
    checkpointing: Checkpointing = NO_CHECKPOINTING

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run. The micro-batch size is none: it depends on the devices, and a run may resume on
        others."""
        names = "optimizer", "optimizer_state_dtype", "optimizer_in_backward", "offload"
        return {name: getattr(self, name) for name in names}

    @property
    def changes(self) -> tuple[int, bool, bool]:
        """What it does beyond a plain step. What changes the result comes first."""
        moments = 2 if self.optimizer == "adamw8bit" else int(self.optimizer_state_dtype == "bfloat16")
        return moments, self.optimizer_in_backward, "optimizer" in self.offload


@dataclass(frozen=True)
class Device:
    """What a placement must fit into. A step can use `usable` of the device's `total` bytes, and `host` bytes of host
    memory are available. time plans that of steps on it."""

    usable: float
    total: int
    host: int
    time: StepTime


@dataclass(frozen=True)
class Fitted:
    """A placement, with the plan of its memory and the seconds of a step."""

    placement: Placement
    memory: TrainingMemory
    seconds: float


def find_device(config: RunConfig, model: CausalLM, world: World) -> Device | None:
    """The device of every rank; None for a CPU, whose memory other processes share."""
    if world.device.type != "cuda":
        return None
    rates = device_rates(device_name(world), config.dtype)
    time = StepTime(model, config.sequence_length, rates, dp_shard_size(world, config.dp_replicate))
    total = device_memory(world)
    host = available_host_memory() if world.planned_for is None else 0  # its host is not known
    return Device(usable_share(total, world), total, host, time)


@dataclass(frozen=True)
class Search:
    """What placements are compared for.

    sizes: the micro-batch sizes that divide a rank's share of the step, the largest first. micro_batches: how many of
    them a step has, by their size. needs: the plan of a run with other settings.
    """

    config: RunConfig
    model: CausalLM
    world: World
    sizes: Sequence[int]
    micro_batches: Callable[[int], int]
    needs: Callable[[RunConfig], MemoryEstimator]
    estimators: dict[Placement, MemoryEstimator] = field(default_factory=dict, init=False)

    def plain(self) -> Placement:
        """The placement that is taken without memory in mind."""
        config, most = self.config, self.most_rows
        size = next((size for size in self.sizes if size <= most), self.sizes[-1])
        if config.is_tiny or config.optimizer_in_backward:
            size = self.sizes[0]
        in_backward, offload = bool(config.optimizer_in_backward), config.offload or ()
        return Placement(size, config.optimizer or "adamw", config.optimizer_state_dtype, in_backward, offload)

    @property
    def most_rows(self) -> int:
        """The rows of a micro-batch beyond which more are not faster."""
        return max(1, MOST_TOKENS[self.world.device.type] * self.world.context // self.config.sequence_length)

    def options(self) -> Iterator[Placement]:
        """All placements that the given settings leave, without checkpointing."""
        config, plain = self.config, self.plain()
        chooses = not config.with_lora  # whose states and gradients are small
        moments = [(plain.optimizer, plain.optimizer_state_dtype)]
        if chooses and config.optimizer is None and config.optimizer_state_dtype is None:
            moments += [("adamw", "bfloat16")] * (config.param_dtype == "float32")
            moments.append(("adamw8bit", None))
        places = [plain.offload]
        if chooses and config.offload is None and self.world.size == 1:
            places.append(("optimizer",))
        useful = [size for size in self.sizes if size <= self.most_rows] or self.sizes[-1:]
        steps = [(size, False) for size in useful]
        if config.optimizer_in_backward:
            steps = [(self.sizes[0], True)]
        elif chooses and config.optimizer_in_backward is None and self.may_step_in_backward:
            steps.append((self.sizes[0], True))
        for (size, in_backward), (optimizer, state_dtype), offload in itertools.product(steps, moments, places):
            yield Placement(size, optimizer, state_dtype, in_backward, offload)

    @property
    def may_step_in_backward(self) -> bool:
        config, micro_batches = self.config, self.micro_batches(self.sizes[0])
        fits = misfit_of_optimizer_in_backward(config, self.world.size, micro_batches) is None
        objectives = FIELDS["optimizer_in_backward"].metadata["objectives"]
        return fits and config.objective in objectives and config.on_nan != "skip"

    def estimate_of(self, placement: Placement) -> MemoryEstimator:
        """The plan of a placement with other checkpointing. It walks over all parameters, and is made once for each."""
        placement = replace(placement, checkpointing=NO_CHECKPOINTING)
        if placement not in self.estimators:
            needs = self.needs(replace(self.config, **placement.settings))
            self.estimators[placement] = cache(partial(needs, batch_size=placement.micro_batch_size))
        return self.estimators[placement]

    def fitted(self, placement: Placement, device: Device, usable: float) -> Fitted:
        """The placement with as little checkpointing as `usable` bytes demand; all of it may not be enough."""
        config, estimate = self.config, self.estimate_of(placement)
        chosen = checkpointing_of(self.model, config.activation_checkpointing, estimate, usable)
        memory = estimate(checkpointed_blocks=chosen.blocks, kept_tensors=chosen.kept_tensors)
        tokens = placement.micro_batch_size * config.sequence_length // self.world.context
        seconds = device.time.seconds(
            memory, tokens, self.micro_batches(placement.micro_batch_size), *chosen,
            in_backward=placement.optimizer_in_backward, in_8_bits=placement.optimizer == "adamw8bit",
        )  # fmt: skip
        return Fitted(replace(placement, checkpointing=chosen), memory, seconds)


def fits_on_host(memory: TrainingMemory, device: Device) -> bool:
    """Whether the host has room for offloaded states, beside a copy of weights and states for a checkpoint."""
    offloaded = memory.offloaded_states
    copied = device.time.trained + memory.optimizer_states + offloaded
    return not offloaded or offloaded + copied <= device.host


def choose_placement(search: Search, device: Device | None) -> Placement:
    """The placement that takes least time of those that fit; where none fits, that which takes least memory."""
    if device is None or search.config.is_tiny:
        return search.plain()
    unlimited = [search.fitted(option, device, math.inf) for option in search.options()]
    if search.config.offload is None:
        unlimited = [option for option in unlimited if fits_on_host(option.memory, device)]
    fitting: list[Fitted] = []
    for option in sorted(unlimited, key=lambda option: option.seconds):
        if fitting and option.seconds > NEARLY * min(each.seconds for each in fitting):
            break  # with what it recomputes it takes longer still
        found = search.fitted(option.placement, device, device.usable)
        if found.memory.peak <= device.usable:
            fitting.append(found)
    if not fitting:
        least = [search.fitted(option.placement, device, 0.0) for option in unlimited]
        return min(least, key=lambda each: each.memory.peak).placement
    fastest = min(each.seconds for each in fitting)
    near = [each for each in fitting if each.seconds <= NEARLY * fastest]
    return min(near, key=lambda each: (each.placement.changes, each.seconds)).placement


def as_choices(placement: Placement, plain: Placement, device: Device | None) -> dict[str, Choice]:
    """The settings of a placement, with a reason for each that is not that of a plain step."""
    reason = f"the fastest of what fits into {memory_size(device.total)}" if device else ""
    return {
        name: Choice(value, reason if value != plain.settings[name] else "")
        for name, value in placement.settings.items()
    }
