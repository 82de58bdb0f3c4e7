"""A checkpoint folder into a model's parameters, strictly and without a copy of either.

Each Hub tensor is streamed straight into its place in a packed parameter; of a parameter that is a DTensor, each rank
reads only what meets its own shard. Nothing is copied before every name, shape and dtype is known to fit. Knows
parameters, rules and folders; no family.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ligermodels.distributed import is_first
from ligermodels.errors import CheckpointError
from ligermodels.weights.files import Checkpoint, StoredTensor, open_checkpoint, shortened
from ligermodels.weights.mapping import Piece, Rule, plan
from ligermodels.weights.streaming import Transfer, bit_equal, stream

# Old files store what every reader recomputes from the configuration.
STALE = re.compile(r"(.+\.)?rotary_emb\.inv_freq")
MORE_PIECES = 10_000  # than there are tensors: from so many on, what is missing is not listed
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class HubModel(Protocol):
    """What loading and exporting ask of a module: its parameters, and how the Hub knows them."""

    @property
    def config(self) -> Any:
        """`raw`, the dict of its config.json; `tie_word_embeddings`; `alternative_names`, see both_spellings."""

    @property
    def hub_class(self) -> str:
        """config.json's `architectures` where the raw configuration has none."""

    def weight_rules(self) -> tuple[Rule, ...]:
        """The rules that lead to the Hub's names; parameters they leave out have them already."""

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """Further layouts that loading accepts, such as the one that transformers 5 has in memory."""

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """As of torch.nn.Module."""

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """As of torch.nn.Module."""

    def get_submodule(self, target: str) -> Any:
        """As of torch.nn.Module."""


@dataclass(frozen=True)
class Fit:
    """Which tensors of a checkpoint fill which boxes of a model's parameters.

    copies: tied tensors that are stored again -> those they must equal. unexpected: tensors that fill nothing.
    """

    checkpoint: Checkpoint
    pieces: list[Piece]
    copies: Mapping[str, str]
    unexpected: list[str]


def load_weights(model: HubModel, folder: str | Path, *, allow_unexpected: bool = False) -> None:
    """Fills the parameters of `model`, in their own dtypes and where they are, from the safetensors of `folder`.

    model: its parameters may be DTensors, but not on the meta device.
    The folder may have any of the model's layouts; faults are reported against the Hub's own, unless another is whole.
    A tied model's folder may hold the tied tensor twice, if both are equal. Stale rotary buffers are passed over.
    allow_unexpected: tensors that the model has no place for are left out with a warning that names them.
    Raises CheckpointError, before anything is copied, where the folder is damaged or a tensor is missing, unexpected,
    of the wrong shape or not floating; ValueError where the model is not ready to be filled.
    """
    refuse_unready(model)
    fill_weights(model, fit_weights(model, open_checkpoint(folder), allow_unexpected=allow_unexpected))


@torch.no_grad()
def fill_weights(model: HubModel, fit: Fit) -> None:
    """The second half of load_weights: fills the parameters as `fit` says, which may have been found on another device.

    Raises CheckpointError where tied tensors are stored twice and differ, or a file cannot be read.
    """
    refuse_unequal(fit.checkpoint, fit.copies)
    folder, stored = fit.checkpoint.folder, fit.checkpoint.tensors
    parts = {name: local_part(parameter) for name, parameter in model.named_parameters()}
    transfers = (transfer_of(*parts[piece.parameter], piece, stored[piece.tensor]) for piece in fit.pieces)
    stream(filter(None, transfers), f"Loading {folder.name}", quiet=not is_first())
    if fit.unexpected and is_first():
        warnings.warn(
            f"{folder}: left out, as the model has no place for them: {shortened(fit.unexpected)}", stacklevel=2
        )


def fit_weights(model: HubModel, checkpoint: Checkpoint, *, allow_unexpected: bool = False) -> Fit:
    """The first half of load_weights: compares names, shapes and dtypes. The model may be on the meta device."""
    rules, planned = layout_of(checkpoint, model)
    pieces = {piece.tensor: piece for piece in planned}
    copies = {copy: original for copy, original in tied_tensors(model, rules).items() if copy in checkpoint.tensors}
    known = pieces.keys() | copies.keys()
    unexpected = [name for name in checkpoint.tensors if name not in known and not STALE.fullmatch(name)]
    refuse_misfits(checkpoint, pieces, [] if allow_unexpected else unexpected)
    return Fit(checkpoint, planned, copies, unexpected)


def layout_of(checkpoint: Checkpoint, model: HubModel) -> tuple[tuple[Rule, ...], list[Piece]]:
    """The first of the model's layouts of which the checkpoint lacks no tensor, or the Hub's own where it lacks some of
    each: its rules, and the pieces they make."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    limit = len(checkpoint.tensors) + MORE_PIECES  # a plan of so many lacks some, and need not be longer
    tried: list[tuple[tuple[Rule, ...], list[Piece]]] = []
    for rules in (model.weight_rules(), *model.other_weight_rules()):
        pieces = plan(shapes, rules, at_most=limit)
        if all(piece.tensor in checkpoint.tensors for piece in pieces):
            return rules, pieces
        tried.append((rules, pieces))
    if len(tried[0][1]) == limit:
        raise CheckpointError(
            f"{checkpoint.folder}: its config.json describes at least {limit} tensors, its files hold "
            f"{len(checkpoint.tensors)}; correct num_hidden_layers or the number of experts, or download it again"
        )
    return tried[0]


def transfer_of(local: Tensor, offset: tuple[int, ...], piece: Piece, stored: StoredTensor) -> Transfer | None:
    """What of a piece lies in this rank's part of its parameter, if anything; local, offset: as of local_part."""
    starts = [max(box.start, begin) for box, begin in zip(piece.index, offset, strict=True)]
    stops = [min(box.stop, begin + n) for box, begin, n in zip(piece.index, offset, local.shape, strict=True)]
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return None
    source = [slice(a - box.start, b - box.start) for a, b, box in zip(starts, stops, piece.index, strict=True)]
    target = [slice(a - begin, b - begin) for a, b, begin in zip(starts, stops, offset, strict=True)]
    source = source[len(piece.index) - len(piece.shape) :]
    shape = [side.stop - side.start for side in source]
    return Transfer(piece.tensor, stored, tuple(source), local[tuple(target)].view(shape))


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and the offset of that in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.dim()
    mesh, placements = parameter.device_mesh, parameter.placements
    return parameter.to_local().detach(), compute_local_shape_and_global_offset(parameter.shape, mesh, placements)[1]


def tied_tensors(model: HubModel, rules: tuple[Rule, ...]) -> dict[str, str]:
    """The Hub names under which a tied parameter would be stored again -> those under which it is stored."""
    owner = {id(parameter): name for name, parameter in model.named_parameters()}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if owner[id(parameter)] != name:
            copies, originals = (plan({n: parameter.shape}, rules) for n in (name, owner[id(parameter)]))
            tied |= {copy.tensor: original.tensor for copy, original in zip(copies, originals, strict=True)}
    return tied


def refuse_meta(model: HubModel) -> None:
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ValueError(f"parameters on the meta device: {shortened(meta)}; call model.to_empty(device=...) first")


def refuse_unready(model: HubModel) -> None:
    refuse_meta(model)
    if model.config.tie_word_embeddings and not tied_tensors(model, model.weight_rules()):
        raise ValueError("tie_word_embeddings is true, but the model shares no parameter: tie it again after to_empty")


def refuse_misfits(checkpoint: Checkpoint, pieces: Mapping[str, Piece], unexpected: list[str]) -> None:
    stored = checkpoint.tensors
    missing = [name for name in pieces if name not in stored]
    others = [f"{name} ({stored[name].file.name})" for name in unexpected]
    fitting = {name: piece for name, piece in pieces.items() if name in stored}
    shapes = [
        f"{name} is {list(stored[name].shape)} instead of {list(piece.shape)} ({stored[name].file.name})"
        for name, piece in fitting.items()
        if stored[name].shape != piece.shape
    ]
    dtypes = [
        f"{name} is {stored[name].dtype} ({stored[name].file.name})"
        for name in fitting
        if stored[name].dtype not in FLOATS
    ]
    faults = {"missing": missing, "unexpected": others, "misshapen": shapes, "not floating (quantized?)": dtypes}
    found = [f"{len(names)} {fault}: {shortened(names)}" for fault, names in faults.items() if names]
    if found:
        leave_out = "; allow_unexpected=True leaves out what the model has no place for" if others else ""
        raise CheckpointError(
            f"{checkpoint.folder}: the weights do not fit its config.json: {'; '.join(found)}{leave_out}"
        )


def refuse_unequal(checkpoint: Checkpoint, copies: Mapping[str, str]) -> None:
    for copy, original in copies.items():
        if not bit_equal(checkpoint, copy, original):
            raise CheckpointError(
                f"{checkpoint.tensors[copy].file}: {copy} differs from {original}, which config.json ties it to; "
                "set tie_word_embeddings to false in config.json to load both"
            )
