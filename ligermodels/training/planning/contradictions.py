"""Settings that contradict each other, refused before any file is read and any memory is allocated.

A command line refuses them before it imports torch, which takes seconds.
"""

from typing import TYPE_CHECKING

from ligermodels.aliases import TRAIN_ALIASES, flag_of
from ligermodels.errors import InputError
from ligermodels.hub.names import DEFAULT_SIZE, refuse_mistyped
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES, RANDOM, missing_data, parse_spec
from ligermodels.training.settings.config import FIELDS, SUPERVISED, UNIT_SETTINGS, RunConfig, TrainConfig
from ligermodels.units import counted, memory_size

if TYPE_CHECKING:
    from ligermodels.distributed import World
    from ligermodels.memory.model import TrainingMemory

LORA_SETTINGS = ("lora_alpha", "lora_dropout", "lora_targets", "modules_to_save", "lora_export")


def refuse_contradictions(config: TrainConfig) -> None:
    """Raises InputError, which names the settings as the flags of the command line."""
    if config.allow_changes and not config.resume:
        raise InputError("--allow-changes goes with --resume, which is missing")
    if config.model is None:
        raise InputError("--model is missing: a family, a Hub id or a folder; --model list shows the families")
    refuse_mistyped(config.model)
    refuse_settings_of_other_objectives(config)
    is_family = config.has_new_weights
    if config.size != DEFAULT_SIZE and not is_family:
        raise InputError(
            f"--size {config.size} goes with a family, which {config.model} is not; --model list shows them"
        )
    if config.revision and is_family:
        raise InputError(
            f"--revision {config.revision} goes with a Hub id; {config.model} is a family, with new weights"
        )
    if config.epochs and config.steps:
        raise InputError(
            f"--epochs {config.epochs:g} and --steps {config.steps} both set the length of the run: leave one out"
        )
    refuse_unused_profile(config)
    if config.chat_template is not None and {parse_spec(text).name for text in config.data or []} == {RANDOM}:
        raise InputError(f"--chat-template {config.chat_template}: --data {RANDOM} has no text; leave one of them out")
    if config.validation_fraction is not None:
        refuse_unused_fraction(config)
    refuse_contradicting_fields(config)
    refuse_contradicting_checkpoints(config)
    if config.optimizer == "adamw8bit" and config.optimizer_state_dtype:
        raise InputError(
            f"--optimizer-state-dtype {config.optimizer_state_dtype}: the states of --optimizer adamw8bit have 8 bits; "
            "leave one of the two out"
        )
    refuse_unused_rounding(config)
    if config.optimizer_in_backward and config.on_nan == "skip":
        raise InputError(
            "--on-nan skip: --optimizer-in-backward has updated some parameters before it sees a gradient that is not "
            "finite; leave one of the two out"
        )
    refuse_unused_offload(config)
    if config.float8_by_torchao and not config.compile:
        raise InputError("--float8 takes twice the time of bfloat16 unless blocks are compiled: add --compile")
    if config.quantize:
        refuse_unfit_quantisation(config)
    if is_family and config.adapter:
        raise InputError(f"--adapter {config.adapter}: {config.model} is a family with new weights, not its base model")
    if is_family and config.exports_adapter:
        raise InputError(f"--lora-export adapter: the new weights of {config.model} would be lost; leave it out")
    unused = [name for name in LORA_SETTINGS if getattr(config, name) != FIELDS[name].default]
    if unused and not config.with_lora:
        raise InputError(f"{flag_of(unused[0])} goes with --lora-rank, which is missing")
    if config.train_parts is not None and config.with_lora:
        raise InputError(
            "--train-parts is for training without LoRA, which trains its updates alone: choose them with "
            "--lora-targets, as all-linear vision; leave --train-parts out"
        )
    if not config.data and not is_family and config.objective in SUPERVISED:
        raise missing_data(config)


def refuse_settings_of_other_objectives(config: TrainConfig) -> None:
    """Raises InputError for a setting that has no effect under the objective."""
    objective = config.objective
    instead = dict.fromkeys(UNIT_SETTINGS.values(), flag_of(UNIT_SETTINGS[objective]))
    if objective == "sft":
        instead["max_length"] = "--sequence-length"
    for name, field in FIELDS.items():
        if objective not in field.metadata["objectives"] and getattr(config, name) != field.default:
            elsewhere = next((alias.names.split()[0] for alias in TRAIN_ALIASES if alias.flag == name), None)
            known = f" (elsewhere {elsewhere})" if elsewhere and field.metadata["group"] == "preferences" else ""
            raise InputError(
                f"{flag_of(name)}{known} has no effect under --objective {objective}, only under "
                f"{', '.join(field.metadata['objectives'])}: "
                + (f"give {instead[name]}" if name in instead else "leave it out")
            )


def refuse_unfit_quantisation(config: TrainConfig) -> None:
    """Raises InputError where --quantize cannot be: its weights are read from a checkpoint, and stay as they are."""
    given = f"--quantize {config.quantize}"
    if config.has_new_weights:
        raise InputError(f"{given}: {config.model} is a family with new weights; name a checkpoint, or leave it out")
    if not config.with_lora:
        raise InputError(f"{given}: quantised weights cannot be trained in full; add --lora-rank 16, or leave it out")
    if config.float8 and config.quantize != "fp8":
        raise InputError(f"{given}: --float8 multiplies weights of --quantize fp8; give that, or leave --float8 out")


def refuse_unused_offload(config: TrainConfig) -> None:
    """Raises InputError where no block saves its input alone, outside of compiled code."""
    offload, checkpointing = config.offload or (), config.activation_checkpointing
    given = next((f"--offload {name}" for name in ("activations", "weights") if name in offload), None)
    if given is None:
        return
    if "activations" in offload and (checkpointing == "none" or (checkpointing is None and config.is_tiny)):
        raise InputError(f"{given}: keeps inputs of checkpointed blocks: add --activation-checkpointing full")
    if "weights" in offload and checkpointing != "full":
        raise InputError("--offload weights: every block is recomputed: add --activation-checkpointing full")
    if config.compile:
        raise InputError(f"{given}: compiled blocks save other tensors; leave --compile out")


def refuse_unused_rounding(config: TrainConfig) -> None:
    """Raises InputError if --param-rounding stochastic has no effect, as far as the parameter dtype is known."""
    given = f"--param-rounding {config.param_rounding}"
    if config.param_rounding != "stochastic":
        return
    if config.param_dtype == "float32":
        raise InputError(
            f"{given}: is for parameters in bfloat16, but these are in float32: add --param-dtype bfloat16"
        )
    if config.optimizer == "muon":
        raise InputError(f"{given}: --optimizer muon does not have it; leave it out, or give --optimizer adamw")


def misfit_of_optimizer_in_backward(config: RunConfig, ranks: int, micro_batches: int) -> str | None:
    """Why parameters cannot be updated during the one backward pass of a step, with a remedy; None where they can.

    config: with its dtypes chosen. micro_batches: of a step of one rank.
    """
    compute = "bfloat16" if config.dtype == "bfloat16" else "float32"
    if ranks > 1:
        resumed = "; of a run that began with it: --optimizer-in-backward off --allow-changes" if config.resume else ""
        return f"runs on one process, not on {ranks} ranks; leave it out{resumed}"
    if micro_batches > 1:
        return (
            f"a step has one backward pass, not {micro_batches} micro-batches; give --micro-batch-size "
            f"{config.batch_size}, or a smaller --batch-size"
        )
    if config.param_dtype != compute:
        return (
            f"parameters in {config.param_dtype} and products in {compute} need FSDP2, which keeps gradients; add "
            f"--param-dtype {compute}"
        )
    return None


def refuse_unfit_optimizer_in_backward(config: RunConfig, ranks: int, micro_batches: int) -> None:
    """Raises InputError for --optimizer-in-backward where it cannot be."""
    misfit = misfit_of_optimizer_in_backward(config, ranks, micro_batches) if config.optimizer_in_backward else None
    if misfit:
        raise InputError(f"--optimizer-in-backward: {misfit}")


def refuse_unfit_offload(config: RunConfig, world: "World", memory: "TrainingMemory", checkpointed_blocks: int) -> None:
    """Raises InputError where ranks share optimizer states, no block is checkpointed, or the host has no room.

    memory: of one rank.
    """
    if "optimizer" in config.offload and world.size > 1:
        out = "give --offload none" if config.resume else "leave it out"
        raise InputError(
            f"--offload optimizer: runs on one process; {world.size} ranks share the states already; {out}"
        )
    if "weights" in config.offload and world.size > 1:
        raise InputError(f"--offload weights: runs on one process; {world.size} ranks shard the weights; leave it out")
    if "weights" in config.offload and not memory.offloaded_weights:
        raise InputError("--offload weights: the model has no weights in few bits; add --quantize nf4, or leave it out")
    if "activations" in config.offload and not checkpointed_blocks:
        raise InputError(
            "--offload activations: has no effect, because a step fits into memory without activation checkpointing; "
            "leave it out, or add --activation-checkpointing full"
        )
    if world.planned_for is not None:  # its host is not known
        return
    from ligermodels.distributed import ranks_of_host  # these import torch, which is there by now
    from ligermodels.layers.checkpointing.host_memory import available_host_memory

    given, both = f"--offload {' '.join(config.offload)}", {"optimizer", "activations"} <= {*config.offload}
    fewer = "offload less" if len(config.offload) > 1 else "leave it out"
    needed, available = memory.host * ranks_of_host(), available_host_memory()
    if needed > available:
        smaller = "optimizer" in config.offload and config.optimizer != "adamw8bit"
        raise InputError(
            f"{given}: takes {memory_size(needed)} of host memory, which has {memory_size(available)} available; "
            f"{'use --optimizer adamw8bit, or ' * smaller}{'offload activations alone' if both else fewer}"
        )
    if "activations" in config.offload and not memory.offloads_every:
        moved = memory_size(memory.host)
        raise InputError(
            f"{given}: the host has {memory_size(available)} available, and beside "
            f"{f'{moved} of what else is offloaded and ' * (memory.host > 0)}a copy of weights and optimizer states no "
            f"room for the input of a block; {fewer}, or shorten --sequence-length"
        )


def refuse_unused_profile(config: TrainConfig) -> None:
    """Raises InputError if the profiled step is none of the run's, as far as their number is known."""
    if config.profile and config.steps and config.profile > config.steps:
        raise InputError(f"--profile {config.profile}: the run has {counted(config.steps, 'step')}; name one of them")


def refuse_contradicting_checkpoints(config: TrainConfig) -> None:
    minutes, default = config.checkpoint_minutes, FIELDS["checkpoint_minutes"].default
    if config.checkpoint_every is not None and minutes != default:
        raise InputError(
            f"--checkpoint-minutes {minutes:g} and --checkpoint-every {config.checkpoint_every} are two ways to say "
            "when: leave one out"
        )
    if config.best_checkpoint and config.checkpoint_every == 0:
        raise InputError("--checkpoint-every 0 keeps no checkpoint that --best-checkpoint could export: leave one out")
    for name in ("best_checkpoint", "push_to_hub"):
        if config.no_export and getattr(config, name):
            raise InputError(f"--no-export leaves nothing for {flag_of(name)}: leave one out")


def refuse_unused_fraction(config: TrainConfig) -> None:
    if config.validation_data:
        raise InputError("--validation-fraction is a part of --data, but --validation-data is given: leave one out")
    if all(parse_spec(text).name in BUILT_IN_SOURCES for text in config.data or []):
        raise InputError(
            f"--validation-fraction is a part of files in --data; {', '.join(BUILT_IN_SOURCES)} have validation data "
            "of their own: leave it out"
        )


def refuse_contradicting_fields(config: TrainConfig) -> None:
    """Raises InputError for field names that contradict each other or are missing."""
    if (config.prompt_field is None) != (config.completion_field is None):
        there, missing = ("prompt", "completion") if config.completion_field is None else ("completion", "prompt")
        raise InputError(f"--{there}-field goes with --{missing}-field, which is missing")
    if config.text_field is not None and config.prompt_field is not None:
        raise InputError("--text-field and --prompt-field name two formats of the same records: leave one out")
