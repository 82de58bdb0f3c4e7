"""Exports, loads and continues LoRA adapters in PEFT's format, and finds the model that one was made for."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ligermodels.adapters.lora_targets import adapter_layouts, insert_lora, untie_head
from ligermodels.adapters.reading import (
    Adapter,
    AdapterSettings,
    fill_updates,
    match_adapter,
    read_adapter,
    recorded_base,
)
from ligermodels.adapters.writing import Layout, write_adapter
from ligermodels.errors import CheckpointError, HubError, InputError, printable
from ligermodels.hub.download import adapter_folder
from ligermodels.hub.models import all_but_weights, complete_model, is_adapter, resolve
from ligermodels.hub.names import exported_by_run
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import lora_modules
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE, BaseModel, read_adapter_config
from ligermodels.weights.config_file import CONFIG_FILE, read_generation_config
from ligermodels.weights.files import weights_fingerprint
from ligermodels.weights.gguf.folder import shown_file
from ligermodels.weights.loading import refuse_meta_parameters

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+(:[\w.-]+)?)?")  # a GGUF file is owner/model:FILE


def export_adapter(
    model: CausalLM, folder: str | Path, *, also: Callable[[Path], None] | None = None, overwrite: bool = False
) -> None:
    """Exports only what LoRA trains, in PEFT's format: adapter_config.json and adapter_model.safetensors.

    The files of the tokenizer are copied from the folder that the model was loaded from. adapter_config.json names this
    model by its Hub id and commit, or by its absolute path. Ranks, `also`, `overwrite` and errors are as for `export`.
    Raises InputError if the model has no LoRA.
    """
    base = BaseModel() if model.source is None else base_model(model.source)
    # PEFT finds modules that were trained as a whole, and all those of models with images, under the names that
    # transformers has in memory: the last layout.
    layout = adapter_layouts(model)[-1 if model.modules_to_save or model.takes_images else 0]
    write_adapter(model, layout, folder, base, also, overwrite)


def load_adapter(
    model: CausalLM, name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None
) -> None:
    """Adds the LoRA of a Hub repository or folder in PEFT's format to a model in place; freezes all other weights.

    model: if it already has LoRA, its settings must equal the adapter's, and its values are overwritten. A sharded
    model must already have LoRA.
    Modules that the adapter stores as a whole (modules_to_save) replace the model's, in the model's dtype. Where it has
    different weights for an embedding and a head that are tied, they are no longer tied, and config.json says so.
    Warns if the adapter was trained on another base than the model's, as far as its files say.
    If the adapter contains a generation_config.json, as one with its own tokenizer does, it replaces the model's.
    Raises HubError, or CheckpointError that names what does not fit: features other than plain and rank-stabilised
    LoRA, tensors that are missing, unexpected or of the wrong shape, LoRA of routers, embeddings or the head.
    """
    refuse_meta_parameters(model)
    folder = adapter_folder(name_or_folder, revision=revision, token=token)
    adapter = read_adapter(folder)
    layout, settings = match(adapter, model)
    if not any(lora_modules(model)):
        if settings.unties:
            untie_head(model)
        insert_lora(model, settings.linears, settings.modules)
    fill_updates(model, adapter, layout, settings)
    warn_of_other_base(adapter, model)
    model.generation_config = read_generation_config(folder) or model.generation_config


def add_lora_of_adapter(model: CausalLM, folder: Path, dtype: torch.dtype) -> None:
    """Adds the LoRA of an adapter's folder without its values, for training. The model may be on the meta device.

    dtype: of all trained parameters. `load_adapter` then reads the values, also into a sharded model. Raises
    CheckpointError as `load_adapter` does.
    """
    _, settings = match(read_adapter(folder), model)
    if settings.unties:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE}: the adapter has different weights for an embedding and a head that the "
            f"model ties: export both as a whole model, with ligermodels export {folder} FOLDER, and train that"
        )
    insert_lora(model, settings.with_dtype(dtype).linears, settings.modules, dtype)


def match(adapter: Adapter, model: CausalLM) -> tuple[Layout, AdapterSettings]:
    """The layout whose names the adapter uses, and its settings for the model. Raises CheckpointError."""
    return match_adapter(adapter, model, adapter_layouts(model))


def base_model(folder: Path) -> BaseModel:
    """How an adapter names the folder of its base: one in the Hub's cache by Hub id and commit, another by its path.
    The folder that shows a GGUF file is named as that file."""
    file = shown_file(folder)
    if file is not None:
        owner = base_model(file.parent)
        return BaseModel(f"{owner.name}:{file.name}", owner.revision) if owner.revision else BaseModel(str(file))
    *_, repository, snapshots, commit = ("", "", *folder.absolute().parts)
    if snapshots == "snapshots" and repository.startswith("models--"):
        return BaseModel(repository.removeprefix("models--").replace("--", "/"), commit)
    return BaseModel(os.path.abspath(folder))


def warn_of_other_base(adapter: Adapter, model: CausalLM) -> None:
    """Warns if an adapter was trained on another base than the model that it has been loaded into: if it records other
    weights, or else, as PEFT's do not, names another model."""
    named = adapter.config.get("base_model_name_or_path")
    if model.source is None:
        return
    ours, recorded = base_model_name(model.source), recorded_base(adapter)
    if recorded is not None:
        different = recorded != weights_fingerprint(model.source) and f"other weights than {ours} has"
    else:
        known = not isinstance(named, str) or not named or is_same_base(named, ours)
        different = not known and f"{named}, which is not known to be {ours}"
    if different:
        line = f"{adapter.folder}: was trained on {different}: on another model its answers are worse"
        warnings.warn(printable(line), stacklevel=3)


def is_same_base(named: str, ours: str) -> bool:
    """Whether two names are of one model. Folders are compared by their weights; of a folder and a Hub id, or of a
    folder that is no longer there, the last part of the name decides."""
    one, other = (Path(name).expanduser() for name in (named, ours))
    if not (one.is_dir() and other.is_dir()):
        return one.name.lower() == other.name.lower()
    try:
        return one.samefile(other) or weights_fingerprint(one) == weights_fingerprint(other)
    except CheckpointError:  # the folder of that name has no weights
        return False


def base_model_name(folder: Path) -> str:
    """The Hub id of a folder in the Hub's cache, else the folder's absolute path."""
    return str(base_model(folder).name)


def base_of_adapter(folder: Path, remedy: str) -> BaseModel:
    """The model that an adapter's folder names as its base.

    Raises CheckpointError if it names none, or a folder that does not exist. remedy: the end of its message.
    """
    config = read_adapter_config(folder)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise missing_base(folder, name, "it names no model", remedy)
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        if path.is_dir() and not (exported_by_run(path) / CONFIG_FILE).exists():
            raise missing_base(folder, name, f"there is no model, which has a {CONFIG_FILE}", remedy)
        return BaseModel(name)
    if not HUB_ID.fullmatch(name):
        raise missing_base(folder, name, "there is no such folder", remedy)
    return BaseModel(name, revision if isinstance(revision, str) else None)


def missing_base(folder: Path, name: Any, reason: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"{folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path is {name!r}; {reason}; {remedy}")


def resolve_with_adapter(
    name_or_folder: str | Path, adapter: str | Path | None = None, *, revision: str | None = None,
    token: str | None = None, remedy: str = "pass its base model too",
) -> tuple[Path, Path | None]:  # fmt: skip
    """The folders of a model and of its adapter, if it has one. The name of an adapter stands for it and its base.

    remedy: what to do where the base of an adapter is not found. Raises HubError, ConfigError or CheckpointError, as
    `resolve` does; InputError if two adapters are given.
    """
    folder = all_but_weights(name_or_folder, revision, token)
    if not is_adapter(folder):
        found = None if adapter is None else adapter_folder(adapter, token=token)
        return complete_model(name_or_folder, folder, token), found
    if adapter is not None:
        raise InputError(f"{name_or_folder}: is an adapter itself, beside the adapter {adapter}; give its base model")
    folder = adapter_folder(name_or_folder, revision=revision, token=token)
    base = base_of_adapter(folder, remedy)
    try:
        return resolve(str(base.name), revision=base.revision, token=token), folder
    except HubError as error:
        raise missing_base(folder, base.name, str(error), remedy) from error
