"""What fits on a GPU: full fine-tuning, LoRA and QLoRA of a model, without data, by the planner of runs.

`ligermodels info --for-gpu` prints it, and docs/hardware.md is a table of it.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ligermodels.adapters.lora_targets import add_lora
from ligermodels.adapters.quantising import is_stored_in_nf4, quantisable, quantise
from ligermodels.distributed import World
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data.formats.specs import RANDOM
from ligermodels.training.objectives import make_objective
from ligermodels.training.parallel.activation_checkpointing import usable_memory
from ligermodels.training.planning.defaults import (
    SFT_TOKENS_PER_STEP,
    TORCH_DTYPES,
    Choice,
    completed,
    parameter_precision,
    precision,
    with_choices,
)
from ligermodels.training.planning.image_load import NO_IMAGES
from ligermodels.training.planning.plan import placement_text
from ligermodels.training.preparing import MemoryFit, Opened, Start, fit_memory
from ligermodels.training.settings.config import TrainConfig
from ligermodels.units import memory_size

SHORTEST = 256  # tokens of a row that is still proposed
MORE_GPUS = 2, 4, 8  # of a host
WAYS = ("full", "LoRA", "QLoRA")
# What a run without data cannot choose, and the memory does not depend on.
WITHOUT_DATA = {"steps": 1, "learning_rate": 1.0, "warmup": 0, "eval_every": 1}


@dataclass(frozen=True)
class Training:
    """A way of training a model: one of WAYS, with steps of `rows` rows of `length` tokens.

    rank: that of the LoRA. checkpointing: as --activation-checkpointing; None for as much as memory demands.
    micro_batch_size: rows; None for that of the fastest step.
    """

    way: str
    length: int
    rows: int
    rank: int = 16
    checkpointing: str | None = None
    micro_batch_size: int | None = None


def rows_of_step(length: int, world: World) -> int:
    """The rows of a step as fine-tuning chooses them for much data, divided equally by the GPUs."""
    return world.size * max(1, SFT_TOKENS_PER_STEP // length // world.size)


def ways_of(model: CausalLM) -> tuple[str, ...]:
    """The ways in which a model can be trained."""
    if is_stored_in_nf4(model):
        return WAYS[2:]
    return WAYS if quantisable(model) else WAYS[:2]


def trainings(model: CausalLM, length: int, rows: int, rank: int, checkpointing: str | None) -> Iterator[Training]:
    """The ways in which a model can be trained; the arguments are those of `Training`."""
    for way in ways_of(model):
        yield Training(way, length, rows, rank, checkpointing)


def fit_of(model: CausalLM, name: str, training: Training, world: World) -> MemoryFit:
    """The plan of the memory of a model on the meta device, called `name`; it is not changed. Raises InputError where
    the GPUs do not divide the rows of a step."""
    given = TrainConfig(
        model=name, data=(RANDOM,), dtype="bfloat16", sequence_length=training.length, batch_size=training.rows,
        lora_rank=None if training.way == "full" else training.rank, micro_batch_size=training.micro_batch_size,
    )  # fmt: skip
    choices = precision(given, world) | parameter_precision(given, world, lambda: None)
    choices |= {name: Choice(value) for name, value in WITHOUT_DATA.items()}
    choices["activation_checkpointing"] = Choice(training.checkpointing or "auto")
    config = completed(with_choices(given, choices)[0])
    compute_dtype, param_dtype = TORCH_DTYPES[config.dtype], TORCH_DTYPES[config.param_dtype]
    fp32 = set(model.fp32_parameters())
    memo = {id(parameter): parameter for parameter in fp32}
    trained = copy.deepcopy(model, memo)
    for parameter in trained.parameters():
        if parameter not in fp32:
            parameter.data = parameter.data.to(compute_dtype if config.with_lora else param_dtype)
    if training.way == "QLoRA":
        quantise(trained, "nf4")
    if config.with_lora:
        add_lora(trained, rank=training.rank, dtype=param_dtype)
    objective = make_objective(config, world)
    return fit_memory(Start(config, [], world, None, None, trained, objective), Opened(config, [], NO_IMAGES))


def fits(fit: MemoryFit, world: World) -> bool:
    return fit.memory.peak <= usable_memory(world)


def verdict(model: CausalLM, name: str, training: Training, world: World) -> str:
    """Whether a way of training fits on every GPU of `world`, in words: how, or what makes it fit."""
    fit = fit_of(model, name, training, world)
    peak, placement = memory_size(fit.memory.peak), fit.placement
    if fits(fit, world):
        size = f"micro-batches of {placement.micro_batch_size} x {training.length}"
        return f"fits: {peak}, {size}{placement_text(fit.config, placement.checkpointing.blocks, len(model.blocks))}"
    return f"does not fit: {peak}; {what_fits_instead(model, name, training, world)}"


def what_fits_instead(model: CausalLM, name: str, training: Training, world: World) -> str:
    """What makes a way of training fit: a smaller step, else more GPUs."""

    def fitting(changed: Training, gpus: World) -> bool:
        return fits(fit_of(model, name, changed, gpus), gpus)

    lengths = [training.length // 2**halvings for halvings in range((training.length // SHORTEST).bit_length())]
    smaller = [replace(training, rows=world.size, length=length) for length in lengths]
    if smaller and fitting(smaller[-1], world):
        found = next(each for each in smaller if each != training and fitting(each, world))
        return f"--batch-size {found.rows} --sequence-length {found.length} fits"
    for number in (number for number in MORE_GPUS if number > world.size):
        more = replace(world, size=number)
        if fitting(replace(training, rows=rows_of_step(training.length, more), micro_batch_size=1), more):
            return f"{number} of them have room for it"
    return "take a larger GPU or a smaller model"
