"""LoRA adapters in PEFT's format: written and strictly read.

The format has two tensors for each of the Hub's projections: `base_model.model.<projection>.lora_A.weight` [r, in] and
`….lora_B.weight` [out, r]; the update is lora_alpha / r * B A, with rank-stabilised LoRA lora_alpha / √r * B A. Which
projections there are and where they lie in packed linears is said by the caller. The update of E stacked experts is
stored as one of rank E r: A [E r, in], one expert after another, and B [out, r E], a column of each expert in turn.
Knows files and names; no layer.
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
from ligermodels.weights.exporting import LowRankModule, hub_tensors
from ligermodels.weights.files import StoredTensor, read_header, safe_file, shortened
from ligermodels.weights.loading import FLOAT_DTYPES, HubModule
from ligermodels.weights.mapping import Piece, is_lora_parameter, plan_pieces
from ligermodels.weights.sharding import copy_local_shard, reshard
from ligermodels.weights.writing import Entry, write_folder, write_json, write_safetensors

ADAPTER_FILE = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
ADAPTER_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
ColumnSpan = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Packed:
    """A linear, and the Hub's projections it consists of, each with its columns of the output.

    groups: the experts whose linears are stacked in it; 1 for a linear. Then parameter is what a configuration calls
    it, and the one projection is the name of the module to which PEFT gives the update.
    """

    in_features: int
    columns: Mapping[str, ColumnSpan]
    groups: int = 1
    parameter: str | None = None


@dataclass(frozen=True)
class LoRASettings:
    """A linear's update without its values: alpha / rank * B A of `rank`, for each span of columns of its output."""

    columns: tuple[ColumnSpan, ...]
    rank: int
    alpha: float
    dropout: float
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Adapter:
    """A folder in PEFT's format, its configuration checked; the tensors, by their names in it, are still on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]


def low_rank_modules(model: HubModule, projections: Iterable[str]) -> dict[str, LowRankModule]:
    """Those of the linears that have an update. Raises InputError where something else has one too."""
    every = dict(model.named_modules())  # of experts without an update, a projection is a parameter
    modules = {linear: every[linear] for linear in projections if hasattr(every.get(linear), "lora_A")}
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters() if is_lora_parameter(name)}
    others = sorted(owners - modules.keys())
    if others:
        raise InputError(f"{shortened(others)}: has LoRA, for which adapters have no name; export the model merged")
    return modules


def adapter_pieces(modules: Mapping[str, LowRankModule], projections: Mapping[str, Packed]) -> list[Piece]:
    """The tensors of an adapter and their boxes of lora_A and lora_B, those of one parameter side by side."""
    return [piece for linear, module in modules.items() for piece in module_pieces(linear, module, projections[linear])]


def module_pieces(linear: str, module: LowRankModule, packed: Packed) -> Iterator[Piece]:
    names = {span: name for name, span in packed.columns.items()}
    if not names.keys() >= set(module.columns):
        raise InputError(f"{linear}: LoRA on columns {module.columns}, which are no projections: {packed.columns}")
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
) -> None:
    """Writes the updates of `model` alone to `folder`, which must be empty or not yet exist, as PEFT reads them.

    projections: of the linears that can have one, under the names of the Hub. base_model: what to say they belong to.
    also: as `write_folder`'s. Where parameters are DTensors every rank calls. Raises InputError where there are none,
    CheckpointError as export_weights does.
    """
    reshard(model)
    modules = low_rank_modules(model, projections)
    if not modules:
        raise InputError("the model has no LoRA to export; add_lora gives it some")
    pieces = adapter_pieces(modules, projections)
    parameters = {f"{name}.{x}": getattr(module, x) for name, module in modules.items() for x in ("lora_A", "lora_B")}
    entries = [Entry(piece.tensor, parameters[piece.parameter].dtype, piece.shape) for piece in pieces]
    # Larger dtypes first, so that every tensor is aligned to its own.
    order = sorted(range(len(pieces)), key=lambda index: -entries[index].dtype.itemsize)
    entries, pieces = [entries[index] for index in order], [pieces[index] for index in order]
    tensors = hub_tensors(model, parameters, pieces, None)
    config = adapter_config_of(modules, projections, hub_module_names(model), base_model)

    def write(temporary: Path) -> None:
        write_safetensors(temporary / ADAPTER_FILE, entries, tensors)
        write_json(temporary / ADAPTER_CONFIG_FILE, config)

    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    write_folder(Path(folder).absolute(), write, tensors, sharded, also)


def hub_module_names(model: HubModule) -> set[str]:
    """What the Hub calls everything in a model that has a weight."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    tensors = (piece.tensor for piece in plan_pieces(shapes, model.weight_rules()))
    return {tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight")}


def adapter_config_of(
    modules: Mapping[str, LowRankModule],
    projections: Mapping[str, Packed],
    all_modules: set[str],
    base_model: str | None,
) -> dict[str, Any]:
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
    """Reads the configuration and the tensors' header. Raises CheckpointError naming the file and the field."""
    folder = Path(folder)
    if (folder / PICKLE).exists() and not (folder / ADAPTER_FILE).exists():
        raise CheckpointError(f"{folder / PICKLE}: pickles can run code and are not read; save it as {ADAPTER_FILE}")
    return Adapter(folder, read_adapter_config(folder), read_header(safe_file(folder, ADAPTER_FILE)))


def match_adapter(
    adapter: Adapter, layouts: Sequence[Mapping[str, Packed]]
) -> tuple[Mapping[str, Packed], dict[str, LoRASettings]]:
    """The first of a model's layouts that knows all projections of the adapter, and what is updated there, and how.

    Raises CheckpointError where it does not fit, by the first layout if by none: every tensor must belong to a
    projection, and every projection have both of its tensors; also each that the configuration targets by name, unless
    it restricts those further. Of experts both projections have an update, or neither.
    """
    found = {match[1] for match in map(ADAPTER_TENSOR.fullmatch, adapter.tensors) if match}
    known = ({name for packed in layout.values() for name in packed.columns} for layout in layouts)
    layout = next((layout for layout, names in zip(layouts, known, strict=True) if found <= names), layouts[0])
    refuse_mismatched_adapter(adapter, layout)
    return layout, lora_settings(adapter, layout)


def lora_settings(adapter: Adapter, projections: Mapping[str, Packed]) -> dict[str, LoRASettings]:
    """Raises CheckpointError where projections that are packed together are updated differently."""
    settings = {}
    for linear, packed in projections.items():
        names = [name for name in packed.columns if tensor_name(name, "A") in adapter.tensors]
        strengths = {rank_and_alpha(adapter.config, packed.parameter or name) for name in names}
        if len(strengths) > 1:
            raise CheckpointError(
                f"{adapter.folder / ADAPTER_CONFIG_FILE}: rank_pattern and alpha_pattern must not tell "
                f"{', '.join(names)} apart, which are one packed linear here"
            )
        if names:
            rank, alpha = strengths.pop()
            dtype = adapter.tensors[tensor_name(names[0], "A")].dtype
            dropout = float(adapter.config.get("lora_dropout", 0.0))
            settings[linear] = LoRASettings(tuple(packed.columns[name] for name in names), rank, alpha, dropout, dtype)
    return settings


def refuse_mismatched_adapter(adapter: Adapter, projections: Mapping[str, Packed]) -> None:
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
        "of no projection that can have LoRA here": [name for name in stored if name not in shapes],
        "misshapen": [
            f"{name} is {list(tensor.shape)} instead of {list(shapes[name])}"
            for name, tensor in stored.items()
            if name in shapes and tensor.shape != shapes[name]
        ],
        "not floating": [
            f"{name} is {tensor.dtype}" for name, tensor in stored.items() if tensor.dtype not in FLOAT_DTYPES
        ],
    }
    said = [f"{len(names)} {fault}: {shortened(names)}" for fault, names in faults.items() if names]
    if said or not stored:
        raise CheckpointError(
            f"{adapter.folder / ADAPTER_FILE}: does not fit the model and {ADAPTER_CONFIG_FILE}: "
            f"{'; '.join(said) or 'it is empty'}"
        )


def refuse_different_lora(
    adapter: Adapter, modules: Mapping[str, LowRankModule], settings: Mapping[str, LoRASettings]
) -> None:
    """Where a model has updates, the adapter must have the same."""
    ours = {linear: (module.columns, module.rank, module.scale) for linear, module in modules.items()}
    theirs = {linear: (own.columns, own.rank, own.alpha / own.rank) for linear, own in settings.items()}
    different = sorted(linear for linear in ours.keys() | theirs.keys() if ours.get(linear) != theirs.get(linear))
    if different:
        linear = different[0]
        raise CheckpointError(
            f"{adapter.folder / ADAPTER_CONFIG_FILE}: the model has other LoRA already: on {linear}, columns, rank and "
            f"scale are {ours.get(linear)}, the adapter's {theirs.get(linear)}"
        )


@torch.no_grad()
def fill_updates(
    model: HubModule, adapter: Adapter, projections: Mapping[str, Packed], settings: Mapping[str, LoRASettings]
) -> None:
    """Fills the updates of a model with the adapter's, of DTensors each rank its part. Raises CheckpointError where the
    model has others."""
    modules = low_rank_modules(model, projections)
    refuse_different_lora(adapter, modules, settings)
    with safe_open(adapter.folder / ADAPTER_FILE, framework="pt") as stored:
        for name, pieces in itertools.groupby(adapter_pieces(modules, projections), key=lambda p: p.parameter):
            linear, _, factor = name.rpartition(".")
            parameter = getattr(modules[linear], factor)
            value = torch.cat([stored.get_tensor(piece.tensor) for piece in pieces])
            copy_local_shard(parameter, value.to(parameter.device, parameter.dtype))
