"""Strictly reads LoRA adapters in PEFT's format: every tensor has a place in the model, and none is missing."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ligermodels.adapters.writing import (
    ADAPTER_FILE,
    BASE_WEIGHTS,
    Layout,
    LoRASettings,
    Packed,
    adapter_pieces,
    low_rank_modules,
    saved_pieces,
    saved_tensor_name,
    tensor_name,
    tied_modules,
)
from ligermodels.errors import CheckpointError
from ligermodels.weights.adapter_config import (
    ADAPTER_CONFIG_FILE,
    is_saved,
    matches_suffix,
    rank_and_alpha,
    read_adapter_config,
    target_names,
)
from ligermodels.weights.files import read_header, shortened
from ligermodels.weights.loading import FLOAT_DTYPES
from ligermodels.weights.module import HubModule, LowRankModule
from ligermodels.weights.reading import weights_file
from ligermodels.weights.sharding import copy_local_shard
from ligermodels.weights.stored import Checkpoint, StoredTensor
from ligermodels.weights.streaming import bit_equal, refuse_not_finite

PICKLE = "adapter_model.bin"
ADAPTER_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Adapter:
    """An adapter folder in PEFT's format, with its validated configuration and its tensors, which stay on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter adds to a model.

    linears: the LoRA of each linear. modules: those that it stores as a whole. unties: whether it has different weights
    for an embedding and a head that are tied in the model.
    """

    linears: Mapping[str, LoRASettings]
    modules: tuple[str, ...]
    unties: bool

    def with_dtype(self, dtype: torch.dtype) -> "AdapterSettings":
        return replace(self, linears={name: replace(lora, dtype=dtype) for name, lora in self.linears.items()})


def read_adapter(folder: str | Path) -> Adapter:
    """Reads the configuration and the header of the tensors. Raises CheckpointError naming the file and the field."""
    folder = Path(folder)
    if (folder / PICKLE).exists() and not (folder / ADAPTER_FILE).exists():
        raise CheckpointError(f"{folder / PICKLE}: pickles can run code and are not read; save it as {ADAPTER_FILE}")
    return Adapter(folder, read_adapter_config(folder), read_header(weights_file(folder, ADAPTER_FILE)))


def recorded_base(adapter: Adapter) -> str | None:
    """The fingerprint of the weights that an adapter of ours was trained on; None where its file has none."""
    with safe_open(adapter.folder / ADAPTER_FILE, framework="pt") as stored:
        return (stored.metadata() or {}).get(BASE_WEIGHTS)


def match_adapter(adapter: Adapter, model: HubModule, layouts: Sequence[Layout]) -> tuple[Layout, AdapterSettings]:
    """The first of the model's layouts that has all projections of the adapter, and the adapter's settings.

    Every tensor must belong to a projection or to a module in modules_to_save, and each of these must have its tensors;
    so must every projection that the configuration targets by name, unless the configuration restricts its targets
    further. Of experts, both projections have LoRA or neither. Raises CheckpointError otherwise; if no layout has all
    projections, the error refers to the first.
    """
    found = {match[1] for match in map(ADAPTER_TENSOR.fullmatch, adapter.tensors) if match}
    known = ({name for packed in layout.projections.values() for name in packed.columns} for layout in layouts)
    layout = next((layout for layout, names in zip(layouts, known, strict=True) if found <= names), layouts[0])
    modules = saved_modules(adapter, model, layout)
    saved = {saved_tensor_name(layout.modules[name]): model.get_parameter(f"{name}.weight").shape for name in modules}
    refuse_mismatched_adapter(adapter, layout.projections, saved)
    unties = has_untied_head(adapter, model, layout, modules)
    return layout, AdapterSettings(lora_settings(adapter, layout.projections), modules, unties)


def saved_modules(adapter: Adapter, model: HubModule, layout: Layout) -> tuple[str, ...]:
    """The modules that the adapter must store as a whole. Raises CheckpointError for a name that matches none."""
    names = adapter.config.get("modules_to_save") or []
    for name in names:
        if not any(is_saved(module, [name]) for module in layout.modules.values()):
            raise CheckpointError(
                f"{adapter.folder / ADAPTER_CONFIG_FILE}: modules_to_save: {name!r} is neither the embedding nor the "
                "head nor a norm; only these are read"
            )
    saved = {module for module, name in layout.modules.items() if is_saved(name, names)}
    if adapter.config.get("ensure_weight_tying") and not saved.isdisjoint(tied := tied_modules(model)):
        saved |= tied
    return tuple(module for module in layout.modules if module in saved)


def has_untied_head(adapter: Adapter, model: HubModule, layout: Layout, modules: Sequence[str]) -> bool:
    """Whether the adapter stores one of a tied embedding and head, or both with different values."""
    tied = tied_modules(model)
    stored = [saved_tensor_name(layout.modules[module]) for module in modules if module in tied]
    if len(stored) < 2:
        return bool(stored)
    return not bit_equal(Checkpoint(adapter.folder, dict(adapter.tensors)), *stored)


def lora_settings(adapter: Adapter, projections: Mapping[str, Packed]) -> dict[str, LoRASettings]:
    """The settings by linear. Raises CheckpointError if projections of one packed linear differ in rank or alpha."""
    settings = {}
    for linear, packed in projections.items():
        names = [name for name in packed.columns if tensor_name(name, "A") in adapter.tensors]
        strengths = {rank_and_alpha(adapter.config, packed.parameter or name) for name in names}
        if len(strengths) > 1:
            raise CheckpointError(
                f"{adapter.folder / ADAPTER_CONFIG_FILE}: rank_pattern and alpha_pattern must give the same values to "
                f"{', '.join(names)}: they are one packed linear here"
            )
        if names:
            rank, alpha = strengths.pop()
            if alpha / rank > torch.finfo(torch.float32).max:
                raise CheckpointError(
                    f"{adapter.folder / ADAPTER_CONFIG_FILE}: lora_alpha gives {names[0]} a scale that is not finite "
                    "in float32; correct it"
                )
            dtype = adapter.tensors[tensor_name(names[0], "A")].dtype
            dropout = float(adapter.config.get("lora_dropout", 0.0))
            settings[linear] = LoRASettings(tuple(packed.columns[name] for name in names), rank, alpha, dropout, dtype)
    return settings


def refuse_mismatched_adapter(
    adapter: Adapter, projections: Mapping[str, Packed], saved: Mapping[str, Sequence[int]]
) -> None:
    """Raises one CheckpointError that lists the tensors that are missing, unexpected, or of a wrong shape or dtype.

    saved: the shapes of the tensors of modules that are stored as a whole.
    """
    stored, config = adapter.tensors, adapter.config
    shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in saved.items()}
    for packed in projections.values():
        for name, (start, stop) in packed.columns.items():
            rank = packed.groups * rank_and_alpha(config, packed.parameter or name)[0]
            shapes |= {tensor_name(name, "A"): (rank, packed.in_features), tensor_name(name, "B"): (stop - start, rank)}
    found = {match[1] for match in map(ADAPTER_TENSOR.fullmatch, stored) if match}
    stacked = {
        name.removesuffix(".base_layer")
        for packed in projections.values()
        if packed.parameter
        for name in packed.columns
    }
    found |= {name + below for name in stacked & found for below in ("", ".base_layer")}
    targets = target_names(config) or ()
    found |= {name for packed in projections.values() for name in packed.columns if matches_suffix(name, targets)}
    needed = [*(tensor_name(name, factor) for name in sorted(found) for factor in "AB"), *saved]
    faults = {
        "missing": [name for name in needed if name in shapes and name not in stored],
        "neither of a projection that can have LoRA nor in modules_to_save": [
            name for name in stored if name not in shapes
        ],
        "of the wrong shape": [
            f"{name} is {list(tensor.shape)} instead of {list(shapes[name])}"
            for name, tensor in stored.items()
            if name in shapes and tensor.shape != shapes[name]
        ],
        "not floating point": [
            f"{name} is {tensor.dtype}" for name, tensor in stored.items() if tensor.dtype not in FLOAT_DTYPES
        ],
    }
    listed = [f"{len(names)} {fault}: {shortened(names)}" for fault, names in faults.items() if names]
    if listed or not stored:
        raise CheckpointError(
            f"{adapter.folder / ADAPTER_FILE}: does not fit the model and {ADAPTER_CONFIG_FILE}: "
            f"{'; '.join(listed) or 'it is empty'}"
        )


def refuse_different_lora(
    adapter: Adapter, model: HubModule, modules: Mapping[str, LowRankModule], settings: AdapterSettings
) -> None:
    """Raises CheckpointError if the model's LoRA differs from the adapter's in linears, columns, ranks or scales, or in
    the modules that are trained as a whole."""
    file = adapter.folder / ADAPTER_CONFIG_FILE
    ours = {linear: (module.columns, module.rank, module.scale) for linear, module in modules.items()}
    theirs = {linear: (own.columns, own.rank, own.alpha / own.rank) for linear, own in settings.linears.items()}
    different = sorted(linear for linear in ours.keys() | theirs.keys() if ours.get(linear) != theirs.get(linear))
    if different:
        linear = different[0]
        raise CheckpointError(
            f"{file}: the model already has different LoRA: on {linear}, columns, rank "
            f"and scale are {ours.get(linear)}, the adapter's are {theirs.get(linear)}"
        )
    unties = settings.unties and tied_modules(model)
    if set(model.modules_to_save) != set(settings.modules) or unties:
        untied = ", with an embedding and a head that are not tied" if unties else ""
        raise CheckpointError(
            f"{file}: the model already has different LoRA: modules_to_save is {list(model.modules_to_save)}, the "
            f"adapter's is {list(settings.modules)}{untied}"
        )


@torch.no_grad()
def fill_updates(model: HubModule, adapter: Adapter, layout: Layout, settings: AdapterSettings) -> None:
    """Copies the adapter's tensors into the model; into the local shards if its parameters are DTensors. Raises
    CheckpointError if the model has different LoRA."""
    modules = low_rank_modules(model, layout.projections)
    refuse_different_lora(adapter, model, modules, settings)
    pieces = [*adapter_pieces(modules, layout.projections), *saved_pieces(model, layout)]
    with safe_open(adapter.folder / ADAPTER_FILE, framework="pt") as stored:
        for name, group in itertools.groupby(pieces, key=lambda piece: piece.parameter):
            parameter = model.get_parameter(name)
            parts = []
            for piece in group:
                tensor = stored.get_tensor(piece.tensor).to(parameter.dtype)
                refuse_not_finite(adapter.folder / ADAPTER_FILE, piece.tensor, tensor.abs().amax(), parameter.dtype)
                parts.append(piece.to_box(tensor))
            copy_local_shard(parameter, torch.cat(parts).to(parameter.device))
