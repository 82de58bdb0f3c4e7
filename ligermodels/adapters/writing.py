"""LoRA adapters in PEFT's format: the names of their tensors, and writing one. `reading.py` reads them.

The format has two tensors for each projection of the Hub: `base_model.model.<projection>.lora_A.weight` [r, in] and
`….lora_B.weight` [out, r]. The update is lora_alpha / r * B A; with rank-stabilised LoRA it is lora_alpha / √r * B A.
The caller says which projections exist and which columns they have in packed linears. The update of E stacked experts
is stored as one update of rank E r: A [E r, in] is one expert after another; in B [out, r E] the experts alternate
column by column. A module that is trained as a whole (`modules_to_save`) has the tensor
`base_model.model.<module>.weight`. Of a tied embedding and head both are stored, and `ensure_weight_tying` is set:
readers that do not know this field get the same logits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE, BaseModel, compose_adapter_config
from ligermodels.weights.config_file import GENERATION_CONFIG_FILE
from ligermodels.weights.exporting import TOKENIZER_FILES, copy_files, hub_tensors
from ligermodels.weights.files import shortened, weights_fingerprint
from ligermodels.weights.mapping import Piece, Rule, full_box, is_lora_parameter, plan_pieces
from ligermodels.weights.module import HubModule, LowRankModule, named_weights, tied_names
from ligermodels.weights.sharding import reshard
from ligermodels.weights.stored import Shape
from ligermodels.weights.writing import Entry, write_folder, write_json, write_safetensors

ADAPTER_FILE = "adapter_model.safetensors"
BASE_WEIGHTS = "base_weights"  # in the metadata of that file: the fingerprint of the base; other readers ignore it
ADAPTER_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, GENERATION_CONFIG_FILE, *TOKENIZER_FILES)
ColumnSpan = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Packed:
    """A linear, and the Hub's projections that are packed in it.

    columns: of each projection, by its Hub name, its columns of the output.
    groups: the number of experts that are stacked; 1 for a linear.
    parameter: for stacked experts, their name in an adapter's configuration. `columns` then has one entry: the name of
    the module to which PEFT attaches the update.
    view, order: if the Hub has the experts' outputs in another order, the sizes into which they are split there, and
    the order of these here.
    """

    in_features: int
    columns: Mapping[str, ColumnSpan]
    groups: int = 1
    parameter: str | None = None
    view: Shape = ()
    order: tuple[int, ...] = ()


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
class Layout:
    """What of a model can be in an adapter, under the names of one checkpoint layout.

    projections: all modules that can have LoRA. modules: those that can be trained as a whole, each with its name on
    the Hub; each has one parameter, its weight. rules: of the layout.
    """

    projections: Mapping[str, Packed]
    modules: Mapping[str, str]
    rules: tuple[Rule, ...]


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
    view, order = ((*packed.view, rank), (*packed.order, len(packed.order))) if packed.view else ((), ())
    for start, stop in module.columns:
        box = slice(row, row := row + stop - start), slice(0, rank)
        tensor = tensor_name(names[start, stop], "B")
        yield Piece(tensor, f"{linear}.lora_B", box, (stop - start, rank), view, order)


def tensor_name(projection: str, factor: str) -> str:
    return f"base_model.model.{projection}.lora_{factor}.weight"


def saved_tensor_name(module: str) -> str:
    return f"base_model.model.{module}.weight"


@torch.no_grad()
def write_adapter(
    model: HubModule, layout: Layout, folder: str | Path, base: BaseModel, also: Callable[[Path], None] | None = None,
    overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes the LoRA of `model`, and the modules that are trained as a whole, to `folder` in PEFT's format.

    The files of the tokenizer are copied from the folder that the model was loaded from. The folder must be empty or
    not exist. also: see `write_folder`. overwrite: see `export_weights`. If parameters are DTensors, every rank must
    call.
    Raises InputError if the model has no LoRA, and CheckpointError as export_weights does.
    """
    reshard(model)
    modules = low_rank_modules(model, layout.projections)
    if not modules:
        raise InputError("the model has no LoRA to export; add it with add_lora")
    parameters = {f"{name}.{x}": getattr(module, x) for name, module in modules.items() for x in ("lora_A", "lora_B")}
    parameters |= {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in model.modules_to_save}
    pieces = [*adapter_pieces(modules, layout.projections), *saved_pieces(model, layout)]
    entries = [Entry(piece.tensor, parameters[piece.parameter].dtype, piece.shape) for piece in pieces]
    # Larger dtypes first, so that every tensor is aligned to its dtype.
    order = sorted(range(len(pieces)), key=lambda index: -entries[index].dtype.itemsize)
    entries, pieces = [entries[index] for index in order], [pieces[index] for index in order]
    tensors = hub_tensors(model, parameters, pieces, {name: value.dtype for name, value in parameters.items()})
    config = adapter_config_of(model, modules, layout, base)

    def write(temporary: Path) -> None:
        write_safetensors(temporary / ADAPTER_FILE, entries, tensors, base_metadata(model.source))
        write_json(temporary / ADAPTER_CONFIG_FILE, config)
        if model.source is not None:
            copy_files(model.source, temporary, TOKENIZER_FILES)

    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    replaced = ADAPTER_FILES if overwrite else ()
    write_folder(Path(folder).absolute(), write, tensors, sharded, also, replaced)


def base_metadata(source: Path | None) -> dict[str, str]:
    """What the file of an adapter says of the weights that it was trained on; nothing where `source` has none now."""
    if source is not None:
        with suppress(CheckpointError):
            return {BASE_WEIGHTS: weights_fingerprint(source)}
    return {}


def saved_pieces(model: HubModule, layout: Layout) -> Iterator[Piece]:
    for name in model.modules_to_save:
        shape = tuple(model.get_parameter(f"{name}.weight").shape)
        yield Piece(saved_tensor_name(layout.modules[name]), f"{name}.weight", full_box(shape), shape)


def tied_modules(model: HubModule) -> set[str]:
    """The modules whose weight is also that of another module: embedding and head, where they are tied."""
    return {name.removesuffix(".weight") for pair in tied_names(model).items() for name in pair}


def hub_module_names(model: HubModule, rules: Iterable[Rule]) -> set[str]:
    """The names of all modules of the model that have a weight, by the rules of a checkpoint layout."""
    shapes = {name: weight.shape for name, weight in named_weights(model).items()}
    tensors = (*(piece.tensor for piece in plan_pieces(shapes, rules)), *model.kept)
    return {tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight")}


def adapter_config_of(
    model: HubModule, modules: Mapping[str, LowRankModule], layout: Layout, base: BaseModel
) -> dict[str, Any]:
    """adapter_config.json for the LoRA of `modules` and the modules that are trained as a whole."""
    projections = layout.projections
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
    saved = [layout.modules[name] for name in model.modules_to_save]
    tied = not tied_modules(model).isdisjoint(model.modules_to_save)
    return compose_adapter_config(
        ranks, alphas, dropout, hub_module_names(model, layout.rules), parameters, saved, tied, base, model.peft_task,
    )  # fmt: skip
