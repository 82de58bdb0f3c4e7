"""Loads a checkpoint folder into a model's parameters, with strict checks and without a second copy of the weights.

Each Hub tensor is streamed directly into its box of a packed parameter. If a parameter is a DTensor, each rank reads
only the bytes of its own shard. All names, shapes and dtypes are checked before anything is copied.
"""

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from tqdm import tqdm

from ligermodels.configs.quantisation import Mxfp4, Nf4Weights, Scaled, read_quantisation, read_scaled, scheme_of
from ligermodels.distributed import is_first
from ligermodels.errors import CheckpointError, InputError, printable
from ligermodels.weights.bitsandbytes import REMEDY, StoredNf4, largest_value, refuse_undeclared, split_off
from ligermodels.weights.files import open_checkpoint, shortened
from ligermodels.weights.mapping import KeptLayers, Piece, Rule, plan_pieces
from ligermodels.weights.module import HubModule, StoredWeight
from ligermodels.weights.quantised import (
    Scale,
    by_element,
    companions,
    has_undefined_scale,
    needs_scale,
    quantised,
    scale_fault,
    scale_name,
    scale_of,
)
from ligermodels.weights.reading import DOWNLOAD_AGAIN
from ligermodels.weights.sharding import copy_local_shard
from ligermodels.weights.stored import FP4_DTYPE, Checkpoint, StoredTensor, boxes_of, split_dimensions
from ligermodels.weights.streaming import Transfer, bit_equal, read_tensors, refuse_not_finite, run_transfers

# Buffers that old checkpoints contain. Every reader recomputes them from the configuration.
STALE_BUFFERS = re.compile(r"(.+\.)?rotary_emb\.inv_freq")
EXTRA_PIECES = 10_000  # a plan with this many pieces more than there are tensors is cut, and its gaps are not listed
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}


@dataclass(frozen=True)
class LoadPlan:
    """Which tensors of a checkpoint fill which boxes of a model's parameters.

    rules: of the layout that the checkpoint has.
    copies: tied tensors that the checkpoint stores a second time -> the tensor that each must equal.
    kept: tensors that the model does not compute; nothing reads them before an export.
    quantisation: how tensors in FP8 or MXFP4 are scaled; None if the checkpoint has none.
    nf4: the tensors in 4 bits of bitsandbytes, by name.
    unexpected: tensors that the model has no place for.
    """

    checkpoint: Checkpoint
    rules: tuple[Rule, ...]
    pieces: list[Piece]
    copies: Mapping[str, str]
    kept: tuple[str, ...]
    quantisation: Scaled | None
    nf4: Mapping[str, StoredNf4]
    unexpected: list[str]

    @property
    def quantised_parameters(self) -> tuple[str, ...]:
        """The parameters that the checkpoint stores in few bits, all of their tensors or, in NF4, some.

        Raises CheckpointError where another format quantises some alone, or where one has another order there that its
        bits cannot have.
        """
        bits = {p.tensor for p in self.pieces if p.tensor in self.nf4 or self.has_scale(p.tensor)}
        pieces = [piece for piece in self.pieces if piece.tensor in bits]
        found = tuple(dict.fromkeys(piece.parameter for piece in pieces))
        dense = {piece.parameter: piece for piece in self.pieces if piece.tensor not in bits}
        permutable = isinstance(self.quantisation, Mxfp4)
        for piece in pieces:
            other = dense.get(piece.parameter, piece)
            partly = other is not piece and (self.quantisation is not None or len(other.index) > 2)
            if partly or ((piece.view or other.view) and not permutable):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {piece.tensor} is in few bits, but is one weight here with "
                    f"{other.tensor}, which {'is not' if partly else 'has another order'}; {REMEDY}"
                )
        return found

    @property
    def dense_parts(self) -> dict[str, torch.dtype]:
        """The tensors that are one weight with others in NF4, but are not quantised, and their dtypes."""
        mixed = {piece.parameter for piece in self.pieces if piece.tensor in self.nf4}
        dense = (p.tensor for p in self.pieces if p.parameter in mixed and p.tensor not in self.nf4)
        return {tensor: self.checkpoint.tensors[tensor].dtype for tensor in dense}

    def read_nf4_part(self, tensor: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """A tensor of a weight in NF4 for `StoredWeight.pack`, on the host; see `PartlyNf4`. dtype: that of its use."""
        if tensor in self.nf4:
            part = self.nf4[tensor].read()
            refuse_not_finite(self.nf4[tensor].codes.file, tensor, largest_value(part), dtype)
            return part
        return {"values": read_tensors({tensor: self.checkpoint.tensors[tensor]})[tensor]}

    def has_scale(self, tensor: str) -> bool:
        return self.quantisation is not None and needs_scale(tensor, self.checkpoint.tensors[tensor])


def float_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype that weights can have, itself or by its name, "bfloat16". Raises InputError."""
    found = DTYPES_BY_NAME.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in FLOAT_DTYPES:
        raise InputError(f"dtype is {dtype!r}; must be one of {', '.join(DTYPES_BY_NAME)}")
    return found


def load_weights(model: HubModule, folder: str | Path, *, allow_unexpected: bool = False) -> None:
    """Fills the parameters of `model` from the safetensors files of `folder`, on their device and in their dtype.

    model: its parameters may be DTensors, but must not be on the meta device.
    The folder may have any of the model's layouts, and an export then has the same. If no layout is complete, errors
    refer to the Hub's own layout.
    A tied tensor may be stored twice if both copies are equal. Stale rotary buffers are ignored.
    allow_unexpected: ignore tensors that the model has no place for, with a warning that names them.
    Raises CheckpointError, before anything is copied, if the folder is damaged or a tensor is missing, unexpected, of
    the wrong shape or not floating point; ValueError if the model is not ready to be filled.
    """
    refuse_unready(model)
    fill_weights(model, plan_loading(model, open_checkpoint(folder), allow_unexpected=allow_unexpected))


@torch.no_grad()
def fill_weights(model: HubModule, plan: LoadPlan) -> None:
    """The second half of load_weights: reads the tensors of `plan`, which may have been made on another device. Raises
    CheckpointError if tied tensors are stored twice and differ, if a file cannot be read, or has values that are not
    finite."""
    refuse_unequal_copies(plan.checkpoint, plan.copies)
    folder, stored = plan.checkpoint.folder, plan.checkpoint.tensors
    tensors = model.stored_tensors()
    shards = {name: shard_and_offset(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    undone = next((p.tensor for p in plan.pieces if p.tensor in plan.nf4 and p.parameter in shards), None)
    if undone is not None:
        raise CheckpointError(f"{folder}: {undone} is in 4 bits, but the model is not: load it by ligermodels.load")
    unread = {*plan.kept, *plan.unexpected}
    scales = read_scales({name: of for name, of in stored.items() if name not in unread}, plan.quantisation)
    transfers = (
        transfer
        for piece in plan.pieces
        if piece.parameter in shards
        for transfer in local_transfers(*shards[piece.parameter], piece, stored[piece.tensor], scales.get(piece.tensor))
    )
    run_transfers(transfers, f"Loading {folder.name}", quiet=not is_first(), check_finite=True)
    of_quantised = [piece for piece in plan.pieces if piece.parameter not in shards]
    groups = [list(group) for _, group in itertools.groupby(of_quantised, key=lambda piece: piece.parameter)]
    kept_in_bits = set()
    for group in tqdm(groups, f"Quantising {folder.name}", delay=1, disable=not is_first() or None):
        weight, file = tensors[group[0].parameter], stored[group[0].tensor].file
        if any(piece.tensor in plan.nf4 for piece in group):
            fill_stored(weight, file, [plan.read_nf4_part(piece.tensor, weight.dtype) for piece in group])
        elif plan.has_scale(group[0].tensor) and weight.scheme == scheme_of(model.config.raw):
            fill_stored(weight, file, [read_part(p, stored[p.tensor], scales[p.tensor], weight.dtype) for p in group])
            kept_in_bits |= {piece.tensor for piece in group}
        else:
            fill_quantised(weight, group, stored, scales, model.device)
    model.loaded_rules, model.kept = plan.rules, plan.kept
    wide = model.fp32_tensors()
    model.stored_dtypes = {p.parameter: stored[p.tensor].dtype for p in plan.pieces if p.parameter in wide}
    most = most_common_dtype(stored[piece.tensor] for piece in plan.pieces)
    others = (
        piece.tensor
        for piece in plan.pieces
        if piece.tensor in kept_in_bits
        or (piece.parameter in shards and stored[piece.tensor].dtype != tensors[piece.parameter].dtype)
    )
    model.stored_otherwise = tuple(others) if model.dtype == most and not plan.checkpoint.converted else ()
    if plan.unexpected and is_first():
        ignored = f"ignored, the model has no place for them: {shortened(plan.unexpected)}"
        warnings.warn(printable(f"{folder}: {ignored}"), stacklevel=2)


def fill_quantised(
    weight: StoredWeight, pieces: Sequence[Piece], stored: Mapping[str, StoredTensor], scales: Mapping[str, Scale],
    device: torch.device,
) -> None:  # fmt: skip
    """Reads all pieces of one weight, which is dense for as long, and quantises it on the device, where its bytes need
    not be. Raises CheckpointError."""
    value = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    origin = (0,) * value.dim()
    transfers = (
        transfer
        for piece in pieces
        for transfer in local_transfers(value, origin, piece, stored[piece.tensor], scales.get(piece.tensor))
    )
    run_transfers(transfers, "", quiet=True, check_finite=True)
    copy_local_shard(weight.data, weight.quantize(value))


def fill_stored(weight: StoredWeight, file: Path, parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Takes a weight as it is stored, without a change of a bit. file: its first tensor's. Raises CheckpointError."""
    try:
        data = weight.pack(parts)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}; {REMEDY}") from error
    copy_local_shard(weight.data, data.to(weight.data.device))


def read_part(piece: Piece, stored: StoredTensor, scale: Scale, dtype: torch.dtype) -> dict[str, Tensor]:
    """The bits of a tensor in FP8 or MXFP4 for `StoredWeight.pack`, on the host, with rows in the model's order. dtype:
    that of its use, in which its values are finite. Raises CheckpointError."""
    if stored.dtype == FP4_DTYPE:  # two elements a byte
        stored = replace(stored, dtype=torch.uint8, shape=(*stored.shape[:-1], stored.shape[-1] // 2))
    codes = read_tensors({piece.tensor: stored})[piece.tensor]
    refuse_not_finite(stored.file, piece.tensor, scale.largest(codes), dtype)
    part = scale.with_codes(codes)
    if not piece.view:
        return {name: value.flatten(0, -2) if value.dim() > 2 else value for name, value in part.items()}
    rows = piece.view[:-1]
    return {
        name: value.reshape(*rows, value.shape[-1]).permute(piece.order).reshape(math.prod(rows), value.shape[-1])
        for name, value in part.items()
    }


def plan_loading(model: HubModule, checkpoint: Checkpoint, *, allow_unexpected: bool = False) -> LoadPlan:
    """The first half of load_weights: checks names, shapes and dtypes. The model may be on the meta device."""
    quantisation, nf4 = read_scaled(model.config.raw), dict[str, StoredNf4]()
    if isinstance(read_quantisation(model.config.raw), Nf4Weights):
        rest, nf4 = split_off(checkpoint.tensors)
        checkpoint = replace(checkpoint, tensors=rest)
    else:
        refuse_undeclared(checkpoint.tensors)
    checkpoint = replace(checkpoint, tensors=by_element(checkpoint.tensors, quantisation))
    rules, planned = select_layout(checkpoint, model)
    pieces = {piece.tensor: piece for piece in planned}
    copies = {copy: original for copy, original in tied_tensors(model, rules).items() if copy in checkpoint.tensors}
    known = pieces.keys() | copies.keys()
    kept = tuple(model.kept_of(name for name in checkpoint.tensors if name not in known))
    companions_of_quantised = (name for tensor in quantised(checkpoint.tensors) for name in companions(tensor))
    refuse_miscounted_layers(checkpoint.folder, kept, model.kept_layers())
    known |= {*kept, *model.left_out, *companions_of_quantised}
    unexpected = [name for name in checkpoint.tensors if name not in known and not STALE_BUFFERS.fullmatch(name)]
    refuse_mismatched_tensors(checkpoint, pieces, quantisation, nf4, [] if allow_unexpected else unexpected)
    return LoadPlan(checkpoint, rules, planned, copies, kept, quantisation, nf4, unexpected)


def select_layout(checkpoint: Checkpoint, model: HubModule) -> tuple[tuple[Rule, ...], list[Piece]]:
    """The rules and pieces of the first of the model's layouts for which the checkpoint has all tensors.

    Of layouts that differ in shapes alone, it is the first that fits. If no layout is complete, it is the one of which
    the checkpoint has most tensors, so that an error uses the checkpoint's own names.
    """
    loaded = model.stored_tensors().items()
    shapes = {name: tensor.shape for name, tensor in loaded if name not in model.new_parameters}
    limit = len(checkpoint.tensors) + EXTRA_PIECES  # a plan of this length is incomplete anyway
    stored = checkpoint.tensors
    tried: list[tuple[tuple[Rule, ...], list[Piece]]] = []
    complete: list[tuple[tuple[Rule, ...], list[Piece]]] = []
    for rules in (model.weight_rules(), *model.other_weight_rules(), *model.quantised_weight_rules()):
        pieces = plan_pieces(shapes, rules, at_most=limit)
        if all(piece.tensor in stored for piece in pieces):
            if all(stored[piece.tensor].shape == piece.shape for piece in pieces):
                return rules, pieces
            complete.append((rules, pieces))
        tried.append((rules, pieces))
    if complete:
        return complete[0]
    if len(tried[0][1]) == limit:
        raise CheckpointError(
            f"{checkpoint.folder}: its {checkpoint.description} describes at least {limit} tensors, its files hold "
            f"{len(checkpoint.tensors)}; correct num_hidden_layers or the number of experts, or download it again"
        )

    def found(layout: tuple[tuple[Rule, ...], list[Piece]]) -> tuple[int, int]:
        named = [piece for piece in layout[1] if piece.tensor in stored]
        return len(named), sum(stored[piece.tensor].shape == piece.shape for piece in named)

    return max(tried, key=found)


def local_transfers(
    local: Tensor, offset: tuple[int, ...], piece: Piece, stored: StoredTensor, scale: Scale | None = None
) -> Iterator[Transfer]:
    """The parts of a piece that overlap this rank's shard. local, offset: as returned by shard_and_offset. Of a
    permuted piece several boxes may overlap, because its shard ends at any row."""
    starts = [max(box.start, begin) for box, begin in zip(piece.index, offset, strict=True)]
    stops = [min(box.stop, begin + n) for box, begin, n in zip(piece.index, offset, local.shape, strict=True)]
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return
    source = [slice(a - box.start, b - box.start) for a, b, box in zip(starts, stops, piece.index, strict=True)]
    target = local[tuple(slice(a - begin, b - begin) for a, b, begin in zip(starts, stops, offset, strict=True))]
    if not piece.view:
        source = source[len(piece.index) - len(piece.shape) :]
        target = target.view([side.stop - side.start for side in source])
        yield Transfer(piece.tensor, stored, tuple(source), target, scale)
        return
    stored = replace(stored, shape=piece.view)
    scale = None if scale is None else scale.viewed(piece.view)
    for within, sides in boxes_of(source, split_dimensions(piece.box_shape, piece.box_view)):
        part = target[within].view([side.stop - side.start for side in sides])  # never needs a copy
        box = tuple(sides[dim] for dim in piece.inverse_order)
        yield Transfer(piece.tensor, stored, box, part.permute(piece.inverse_order), scale)


def shard_and_offset(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's shard of a parameter, and the shard's offset in the full parameter."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.dim()
    mesh, placements = parameter.device_mesh, parameter.placements
    return parameter.to_local().detach(), compute_local_shape_and_global_offset(parameter.shape, mesh, placements)[1]


def read_scales(tensors: Mapping[str, StoredTensor], quantisation: Scaled | None) -> dict[str, Scale]:
    """The scales of those of these tensors that are quantised, by their names. The scales are among the tensors."""
    if quantisation is None:
        return {}
    names = {name: scale_name(name) for name in quantised(tensors)}
    values = read_tensors({scale: tensors[scale] for scale in names.values()})
    for scale in names.values():
        if has_undefined_scale(values[scale], quantisation):
            file = tensors[scale].file
            raise CheckpointError(f"{file}: {scale} has a scale that is no finite number; {DOWNLOAD_AGAIN}")
    return {name: scale_of(values[scale], quantisation) for name, scale in names.items()}


def most_common_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype:
    """The floating-point dtype of most elements, quantised ones not counted; fp32 if there are none."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOAT_DTYPES:
            elements[tensor.dtype] += math.prod(tensor.shape)
    return max(elements, key=elements.__getitem__, default=torch.float32)


def tied_tensors(model: HubModule, rules: tuple[Rule, ...]) -> dict[str, str]:
    """Tied parameters, by Hub names: the name of the second copy -> the name under which the tensor is stored."""
    owner = {id(parameter): name for name, parameter in model.named_parameters()}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if owner[id(parameter)] != name:
            copies, originals = (plan_pieces({n: parameter.shape}, rules) for n in (name, owner[id(parameter)]))
            tied |= {copy.tensor: original.tensor for copy, original in zip(copies, originals, strict=True)}
    return tied


def refuse_meta_parameters(model: HubModule) -> None:
    """Raises ValueError if a parameter is on the meta device."""
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ValueError(f"parameters on the meta device: {shortened(meta)}; call model.to_empty(device=...) first")


def refuse_unready(model: HubModule) -> None:
    """Raises ValueError if parameters are on the meta device, or if embedding and head should be tied and are not."""
    refuse_meta_parameters(model)
    if model.config.tie_word_embeddings and not tied_tensors(model, model.weight_rules()):
        raise ValueError(
            "tie_word_embeddings is true, but the model shares no parameter: tie the weights again after to_empty"
        )


def refuse_miscounted_layers(folder: Path, kept: Iterable[str], layers: KeptLayers | None) -> None:
    """Raises CheckpointError if a checkpoint has some of these layers, but not as many as its config.json says. It may
    have none: fine-tuned models are often saved without them, and with the config.json of the original."""
    if layers is None:
        return
    numbered = re.compile(rf"{re.escape(layers.prefix)}\d+(?=\.)")
    found = {match.group() for match in map(numbered.match, kept) if match}
    if found and found != set(layers.names):
        raise CheckpointError(
            f"{folder}: its files have {shortened(sorted(found))} to predict further tokens, but {layers.field} in "
            f"config.json is {layers.count}; correct that, or download the folder again"
        )


def refuse_mismatched_tensors(
    checkpoint: Checkpoint, pieces: Mapping[str, Piece], quantisation: Scaled | None,
    nf4: Mapping[str, StoredNf4], unexpected: list[str],
) -> None:  # fmt: skip
    """Raises one CheckpointError that lists the tensors that are missing, unexpected, or of a wrong shape or dtype."""
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
        if stored[name].dtype not in FLOAT_DTYPES
        and name not in nf4
        and not (quantisation and needs_scale(name, stored[name]))
    ]
    names = quantised({name: stored[name] for name in fitting}) if quantisation else []
    scales = [scale_fault(stored, name, quantisation) for name in names if quantisation]
    faults = {
        "missing": missing, "unexpected": others, "of the wrong shape": shapes,
        "not floating point (quantized?)": dtypes, "without a fitting scale": list(filter(None, scales)),
    }  # fmt: skip
    found = [f"{len(names)} {fault}: {shortened(names)}" for fault, names in faults.items() if names]
    if found:
        remedy = "; allow_unexpected=True ignores the unexpected tensors" if others else ""
        raise CheckpointError(
            f"{checkpoint.folder}: the weights do not fit its {checkpoint.description}: {'; '.join(found)}; "
            f"{DOWNLOAD_AGAIN}, or correct its {checkpoint.description}{remedy}"
        )


def refuse_unequal_copies(checkpoint: Checkpoint, copies: Mapping[str, str]) -> None:
    """Raises CheckpointError if a tied tensor is stored twice with different values."""
    for copy, original in copies.items():
        if not bit_equal(checkpoint, copy, original):
            raise CheckpointError(
                f"{checkpoint.tensors[copy].file}: {copy} differs from {original}, but config.json ties the two; "
                "set tie_word_embeddings to false in config.json to load both"
            )
