"""Writes and strictly reads LoRA adapters in PEFT's format.

The format has two tensors for each projection of the Hub: `base_model.model.<projection>.lora_A.weight` [r, in] and
`….lora_B.weight` [out, r]. The update is lora_alpha / r * B A; with rank-stabilised LoRA it is lora_alpha / √r * B A.
The caller says which projections exist and which columns they have in packed linears. The update of E stacked experts
is stored as one update of rank E r: A [E r, in] is one expert after another; in B [out, r E] the experts alternate
column by column. Knows files and names; must not know layers.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.adapter_config import (
    ADAPTER_CONFIG_FILE,
    compose_adapter_config,
    matches_suffix,
    rank_and_alpha,
    read_adapter_config,
    target_names,
)
from ligermodels.weights.config_file import GENERATION_CONFIG_FILE
from ligermodels.weights.exporting import TOKENIZER_FILES, hub_tensors
from ligermodels.weights.files import StoredTensor, read_header, shortened
from ligermodels.weights.loading import FLOAT_DTYPES
from ligermodels.weights.mapping import Piece, is_lora_parameter, plan_pieces
from ligermodels.weights.module import HubModule, LowRankModule
from ligermodels.weights.reading import safe_file
from ligermodels.weights.sharding import copy_local_shard, reshard
from ligermodels.weights.writing import Entry, write_folder, write_json, write_safetensors

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, GENERATION_CONFIG_FILE, *TOKENIZER_FILES)
PICKLE = "adapter_model.bin"
ADAPTER_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
ColumnSpan = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Packed:
    """A linear, and the Hub's projections that are packed in it.

    columns: of each projection, by its Hub name, its columns of the output.
    groups: the number of experts that are stacked; 1 for a linear.
    parameter: for stacked experts, their name in an adapter's configuration. `columns` then has one entry: the name of
    the module to which PEFT attaches the update.
    """

    in_features: int
    columns: Mapping[str, ColumnSpan]
    groups: int = 1
    parameter: str | None = None


@dataclass(frozen=True)
class LoRASettings:
    """The settings of a linear's LoRA: alpha / rank * B A for each span of columns of its output.

    dtype: of the update's parameters; None for the base's.
    """

    columns: tuple[ColumnSpan, ...]
    rank: int
    alpha: float
    dropout: float
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Adapter:
    """An adapter folder in PEFT's format, with its validated configuration and its tensors, which stay on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]


def low_rank_modules(model: HubModule, projections: Iterable[str]) -> dict[str, LowRankModule]:
    """The linears that have LoRA, by name. Raises InputError if anything other than `projections` has it."""
    every = dict(model.named_modules())  # a projection of experts without LoRA is a parameter, not a module
    candidates = ((linear, every.get(linear)) for linear in projections)
    modules = {linear: module for linear, module in candidates if isinstance(module, LowRankModule)}
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters() if is_lora_parameter(name)}
    others = sorted(owners - modules.keys())
    if others:
        raise InputError(f"{shortened(others)}: its LoRA cannot be stored in an adapter; export the merged model")
    return modules


def adapter_pieces(modules: Mapping[str, LowRankModule], projections: Mapping[str, Packed]) -> list[Piece]:
    """The tensors of an adapter and their boxes in lora_A and lora_B, grouped by parameter."""
    return [piece for linear, module in modules.items() for piece in module_pieces(linear, module, projections[linear])]


def module_pieces(linear: str, module: LowRankModule, packed: Packed) -> Iterator[Piece]:
    """The adapter's tensors of one linear."""
    names = {span: name for name, span in packed.columns.items()}
    if not names.keys() >= set(module.columns):
        raise InputError(
            f"{linear}: has LoRA on columns {module.columns}, which are not its projections: {packed.columns}"
        )
    rank, every = packed.groups * module.rank, slice(0, packed.in_features)
    for number, span in enumerate(module.columns):
        rows = slice(number * rank, (number + 1) * rank)
        yield Piece(tensor_name(names[span], "A"), f"{linear}.lora_A", (rows, every), (rank, packed.in_features))
    row = 0
    for start, stop in module.columns:
        rows = slice(row, row := row + stop - start)
        yield Piece(
            tensor_name(names[start, stop], "B"), f"{linear}.lora_B", (rows, slice(0, rank)), (stop - start, rank)
        )


def tensor_name(projection: str, factor: str) -> str:
    return f"base_model.model.{projection}.lora_{factor}.weight"


@torch.no_grad()
def write_adapter(
    model: HubModule,
    projections: Mapping[str, Packed],
    folder: str | Path,
    base_model: str | None,
    also: Callable[[Path], None] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the LoRA of `model` to `folder` in PEFT's format. The folder must be empty or not exist.

    projections: the linears that can have LoRA. base_model: written as base_model_name_or_path. also: see
    `write_folder`. overwrite: see `export_weights`. If parameters are DTensors, every rank must call.
    Raises InputError if the model has no LoRA, and CheckpointError as export_weights does.
    """
    reshard(model)
    modules = low_rank_modules(model, projections)
    if not modules:
        raise InputError("the model has no LoRA to export; add it with add_lora")
    pieces = adapter_pieces(modules, projections)
    parameters = {f"{name}.{x}": getattr(module, x) for name, module in modules.items() for x in ("lora_A", "lora_B")}
    entries = [Entry(piece.tensor, parameters[piece.parameter].dtype, piece.shape) for piece in pieces]
    # Larger dtypes first, so that every tensor is aligned to its dtype.
    order = sorted(range(len(pieces)), key=lambda index: -entries[index].dtype.itemsize)
    entries, pieces = [entries[index] for index in order], [pieces[index] for index in order]
    tensors = hub_tensors(model, parameters, pieces, None)
    config = adapter_config_of(modules, projections, hub_module_names(model), base_model)

    def write(temporary: Path) -> None:
        write_safetensors(temporary / ADAPTER_FILE, entries, tensors)
        write_json(temporary / ADAPTER_CONFIG_FILE, config)

    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    replaced = ADAPTER_FILES if overwrite else ()
    write_folder(Path(folder).absolute(), write, tensors, sharded, also, replaced)


def hub_module_names(model: HubModule) -> set[str]:
    """The Hub's names of all modules of the model that have a weight."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    tensors = (piece.tensor for piece in plan_pieces(shapes, model.weight_rules()))
    return {tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight")}


def adapter_config_of(
    modules: Mapping[str, LowRankModule],
    projections: Mapping[str, Packed],
    all_modules: set[str],
    base_model: str | None,
) -> dict[str, Any]:
    """adapter_config.json for the LoRA of `modules`. all_modules: as returned by hub_module_names."""
    owners = {
        packed.parameter or name: module
        for linear, module in modules.items()
        for packed in (projections[linear],)
        for name, span in packed.columns.items()
        if span in module.columns
    }
    ranks = {name: module.rank for name, module in owners.items()}
    alphas = {name: module.alpha for name, module in owners.items()}
    dropout = max(module.dropout for module in modules.values())
    parameters = {name for linear in modules if (name := projections[linear].parameter) is not None}
    return compose_adapter_config(ranks, alphas, dropout, all_modules, parameters, base_model)


def read_adapter(folder: str | Path) -> Adapter:
    """Reads the configuration and the header of the tensors. Raises CheckpointError naming the file and the field."""
    folder = Path(folder)
    if (folder / PICKLE).exists() and not (folder / ADAPTER_FILE).exists():
        raise CheckpointError(f"{folder / PICKLE}: pickles can run code and are not read; save it as {ADAPTER_FILE}")
    return Adapter(folder, read_adapter_config(folder), read_header(safe_file(folder, ADAPTER_FILE)))


def match_adapter(
    adapter: Adapter, layouts: Sequence[Mapping[str, Packed]]
) -> tuple[Mapping[str, Packed], dict[str, LoRASettings]]:
    """The first of the model's layouts that has all projections of the adapter, and the adapter's settings by linear.

    Every tensor must belong to a projection, and every projection must have both of its tensors; so must every
    projection that the configuration targets by name, unless the configuration restricts its targets further. Of
    experts, both projections have LoRA or neither. Raises CheckpointError otherwise; if no layout has all projections,
    the error refers to the first.
    """
    found = {match[1] for match in map(ADAPTER_TENSOR.fullmatch, adapter.tensors) if match}
    known = ({name for packed in layout.values() for name in packed.columns} for layout in layouts)
    layout = next((layout for layout, names in zip(layouts, known, strict=True) if found <= names), layouts[0])
    refuse_mismatched_adapter(adapter, layout)
    return layout, lora_settings(adapter, layout)


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
            dtype = adapter.tensors[tensor_name(names[0], "A")].dtype
            dropout = float(adapter.config.get("lora_dropout", 0.0))
            settings[linear] = LoRASettings(tuple(packed.columns[name] for name in names), rank, alpha, dropout, dtype)
    return settings


def refuse_mismatched_adapter(adapter: Adapter, projections: Mapping[str, Packed]) -> None:
    """Raises one CheckpointError that lists the tensors that are missing, unexpected, or of a wrong shape or dtype."""
    stored, config = adapter.tensors, adapter.config
    shapes: dict[str, tuple[int, int]] = {}
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
    needed = [tensor_name(name, factor) for name in sorted(found) for factor in "AB"]
    faults = {
        "missing": [name for name in needed if name in shapes and name not in stored],
        "not of a projection that can have LoRA": [name for name in stored if name not in shapes],
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
    adapter: Adapter, modules: Mapping[str, LowRankModule], settings: Mapping[str, LoRASettings]
) -> None:
    """Raises CheckpointError if the model's LoRA differs from the adapter's in linears, columns, ranks or scales."""
    ours = {linear: (module.columns, module.rank, module.scale) for linear, module in modules.items()}
    theirs = {linear: (own.columns, own.rank, own.alpha / own.rank) for linear, own in settings.items()}
    different = sorted(linear for linear in ours.keys() | theirs.keys() if ours.get(linear) != theirs.get(linear))
    if different:
        linear = different[0]
        raise CheckpointError(
            f"{adapter.folder / ADAPTER_CONFIG_FILE}: the model already has different LoRA: on {linear}, columns, rank "
            f"and scale are {ours.get(linear)}, the adapter's are {theirs.get(linear)}"
        )


@torch.no_grad()
def fill_updates(
    model: HubModule, adapter: Adapter, projections: Mapping[str, Packed], settings: Mapping[str, LoRASettings]
) -> None:
    """Copies the adapter's tensors into the model's LoRA; into the local shards if they are DTensors.

    Raises CheckpointError if the model has different LoRA.
    """
    modules = low_rank_modules(model, projections)
    refuse_different_lora(adapter, modules, settings)
    with safe_open(adapter.folder / ADAPTER_FILE, framework="pt") as stored:
        for name, pieces in itertools.groupby(adapter_pieces(modules, projections), key=lambda p: p.parameter):
            linear, _, factor = name.rpartition(".")
            parameter = getattr(modules[linear], factor)
            value = torch.cat([stored.get_tensor(piece.tensor) for piece in pieces])
            copy_local_shard(parameter, value.to(parameter.device, parameter.dtype))
