"""Describes a model from its config.json and its file names alone: no weights are read or downloaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import HubError
from ligermodels.hub import models
from ligermodels.hub.download import indexed_files, weight_sizes
from ligermodels.hub.names import family_of, local_folder
from ligermodels.layers.decoder import CausalLM
from ligermodels.units import parameter_count
from ligermodels.weights.config_file import CONFIG_FILE, DTYPE_KEYS, read_config
from ligermodels.weights.files import SINGLE_FILE, open_checkpoint
from ligermodels.weights.gguf.finding import gguf_files
from ligermodels.weights.gguf.folder import shown_file
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
    and index, or the GGUF file that it names).

    dtype: None for the checkpoint's dtype. Raises HubError, ConfigError or CheckpointError.
    """
    if family_of(name) in ARCHITECTURES:
        return Description(models.create(name, device="meta"), dtype or PRESET_DTYPE, {})
    folder = local_folder(name, revision)
    if folder is not None:
        files = local_weight_sizes(folder)
    else:
        folder = models.fetch_config(name, revision)
        files = local_weight_sizes(folder) if shown_file(folder) else weight_sizes(name, folder, token=None)
    raw = read_config(folder)
    model = models.build_on_meta(*models.select_architecture(raw, folder / CONFIG_FILE))
    return Description(model, dtype or weight_dtype(raw, folder), files)


def local_weight_sizes(folder: Path) -> dict[str, int | None]:
    """The weight files of a folder and their bytes; None for a file that the index names and that is missing."""
    names = [SINGLE_FILE] if (folder / SINGLE_FILE).exists() else indexed_files(folder)
    names = names or [file.name for file in gguf_files(folder)]
    return {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in names}


def weight_dtype(raw: Mapping[str, Any], folder: Path) -> torch.dtype:
    """The dtype in config.json, else that of the stored weights. Raises HubError if neither is known."""
    if any(raw.get(key) for key in DTYPE_KEYS):
        return models.checkpoint_dtype(dict(raw), Checkpoint(folder, {}))
    if (folder / SINGLE_FILE).exists():
        return models.checkpoint_dtype(dict(raw), open_checkpoint(folder))
    raise HubError(f"{folder / CONFIG_FILE}: field dtype is missing; pass --dtype")


def architecture_lines() -> Iterator[str]:
    """One line per architecture: its presets with their numbers of parameters. `architectures.txt` holds them."""
    for name, architecture in sorted(ARCHITECTURES.items()):
        models_by_size = {size: models.create(name, size=size, device="meta") for size in architecture.SIZES}
        counts = {size: sum(x.numel() for x in model.parameters()) for size, model in models_by_size.items()}
        presets = [f"{size} ({parameter_count(count)})" for size, count in counts.items()]
        yield f"{name:16} {', '.join(presets) or 'from a checkpoint'}"
