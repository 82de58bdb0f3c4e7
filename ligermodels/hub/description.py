"""Describes a model from its config.json and the headers of its files: no weights are read or downloaded."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.base import Config
from ligermodels.errors import HubError
from ligermodels.hub import models
from ligermodels.hub.download import indexed_files, weight_sizes
from ligermodels.hub.names import family_of
from ligermodels.layers.decoder import CausalLM
from ligermodels.units import parameter_count
from ligermodels.weights.config_file import CONFIG_FILE, DTYPE_KEYS, read_config
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from ligermodels.weights.gguf.folder import shown_file
from ligermodels.weights.gguf.names import gguf_files
from ligermodels.weights.loading import plan_loading
from ligermodels.weights.stored import Checkpoint

PRESET_DTYPE = torch.float32  # the default dtype of `create`


@dataclass(frozen=True)
class Description:
    """model: on the meta device. dtype: of its weights. files: its weight files and their bytes, None if missing."""

    model: CausalLM
    dtype: torch.dtype
    files: Mapping[str, int | None]


def describe(name: str, *, dtype: torch.dtype | None = None, revision: str | None = None) -> Description:
    """Describes a family such as "qwen2" or "qwen2:0.5b", a folder, a GGUF file, or a Hub id (downloads its config.json
    and index, or the GGUF file that it names). The headers of weights that are there must fit the model, as for `load`.

    dtype: None for the checkpoint's dtype. Raises HubError, ConfigError or CheckpointError.
    """
    if family_of(name) in ARCHITECTURES:
        return Description(models.create(name, device="meta"), dtype or PRESET_DTYPE, {})
    local = models.local_model_folder(name, revision)
    folder = local or models.fetch_config(name, revision)
    raw = read_config(folder)
    selected = models.select_architecture(raw, folder / CONFIG_FILE)
    is_whole = local is not None or shown_file(folder) is not None
    checkpoint = open_checkpoint(folder) if is_whole and has_weights(folder) else None
    model = build_for(checkpoint, *selected)
    files = local_weight_sizes(folder) if is_whole else weight_sizes(name, folder, token=None)
    return Description(model, dtype or weight_dtype(raw, folder, checkpoint), files)


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, valid or not, or an index of weights."""
    return any(os.path.lexists(folder / name) for name in (SINGLE_FILE, INDEX_FILE)) or bool(gguf_files(folder))


def build_for(checkpoint: Checkpoint | None, architecture: type[CausalLM], config: Config) -> CausalLM:
    """Builds the model on the meta device. Raises CheckpointError, as `load` does, for weights that do not fit."""
    if checkpoint is None:
        return models.build_on_meta(architecture, config)
    models.refuse_layers_without_tensors(config, checkpoint)
    model = models.build_on_meta(architecture, config)
    plan_loading(model, checkpoint)
    return model


def local_weight_sizes(folder: Path) -> dict[str, int | None]:
    """The weight files of a folder, which exist, and their bytes."""
    names = [SINGLE_FILE] if (folder / SINGLE_FILE).exists() else indexed_files(folder)
    return {name: (folder / name).stat().st_size for name in names or [file.name for file in gguf_files(folder)]}


def weight_dtype(raw: Mapping[str, Any], folder: Path, checkpoint: Checkpoint | None) -> torch.dtype:
    """The dtype in config.json, else that of the stored weights. Raises HubError if neither is known."""
    if checkpoint is None and not any(raw.get(key) for key in DTYPE_KEYS):
        raise HubError(f"{folder / CONFIG_FILE}: field dtype is missing; pass --dtype")
    return models.checkpoint_dtype(dict(raw), checkpoint or Checkpoint(folder, {}))


def architecture_lines() -> Iterator[str]:
    """One line per architecture: its presets with their numbers of parameters. `architectures.txt` holds them."""
    for name, architecture in sorted(ARCHITECTURES.items()):
        models_by_size = {size: models.create(name, size=size, device="meta") for size in architecture.SIZES}
        counts = {size: sum(x.numel() for x in model.parameters()) for size, model in models_by_size.items()}
        presets = [f"{size} ({parameter_count(count)})" for size, count in counts.items()]
        yield f"{name:16} {', '.join(presets) or 'from a checkpoint'}"
