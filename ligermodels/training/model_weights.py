"""The weights of a run's model: those that it begins with, and those of one of its checkpoints, to try it."""

from dataclasses import replace
from pathlib import Path

import torch

from ligermodels import distributed
from ligermodels.errors import InputError
from ligermodels.hub import load_adapter
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import initialize_lora
from ligermodels.layers.reward_model import initialize_new_parameters
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.checkpoints.files import step_folder, verify_files
from ligermodels.training.checkpoints.saving import load_tensors
from ligermodels.training.checkpoints.state import trained_weights
from ligermodels.training.data.run_tokenizer import generation_config
from ligermodels.training.preparing import prepare
from ligermodels.training.run.folder import CHECKPOINTS
from ligermodels.training.settings.config import TrainConfig
from ligermodels.weights.loading import load_weights


def give_initial_weights(
    model: CausalLM, pretrained: Path | None, adapter: Path | None, seed: int, device: torch.device, *,
    offloads: bool = False,
) -> None:  # fmt: skip
    """Gives a model on the meta device, which may be sharded, its memory and the weights that a run begins with.

    offloads: keeps quantised weights in host memory.
    """
    if offloads:
        model.offload_weights(device)
    model.to_empty(device=device)
    if pretrained is None:
        model.initialize(seed)
        return
    load_weights(model, pretrained)
    initialize_new_parameters(model, seed)
    initialize_lora(model, torch.Generator(device).manual_seed(seed))
    model.source = pretrained
    if adapter:
        load_adapter(model, adapter)


def load_checkpoint(config: TrainConfig, folder: Path, step: int) -> tuple[CausalLM, Tokenizer]:
    """The model of a run with the weights of a checkpoint, and its tokenizer; in one process, for generation.

    config: the settings in the run's train.toml. folder: of the run, which may still train: nothing in it is changed.
    Raises InputError where the model has no tokenizer, or the checkpoint is gone or damaged.
    """
    config = replace(config, dp_replicate=1, context_parallel=1, expert_parallel=1)
    config = replace(config, resume=None, allow_changes=False)  # a finished run cannot be resumed, but tried
    run = prepare(config, distributed.start(), runs_code=False)
    data, checkpoint = run.objective.data, step_folder(folder / CHECKPOINTS, step)
    if data.tokenizer is None:
        raise InputError(f"{folder}: was trained on token ids and has no tokenizer")
    if not checkpoint.is_dir():
        raise InputError(f"{checkpoint}: is not there any more; newer checkpoints have replaced it")
    verify_files(checkpoint, 0, 1)
    device, offloads = distributed.start().device, "weights" in run.config.offload
    give_initial_weights(run.model, run.pretrained, run.adapter, config.seed, device, offloads=offloads)
    load_tensors(checkpoint, trained_weights(run.model), part="weights.")
    run.model.generation_config = generation_config(
        data.tokenizer, run.model.generation_config, run.model.config.raw, chats=bool(data.tokenizer.templates)
    )
    return run.model.eval(), data.tokenizer
