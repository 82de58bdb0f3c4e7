"""Exports a model to a folder that transformers 4 and 5 and vLLM read: the inverse of loading, over the same pieces.

Tensors get the names that they were loaded under. A folder of which only transformers 5 knows the names, such as one
that its save_pretrained(save_original_format=False) wrote, therefore stays one. At most one parameter is gathered at a
time, and the host holds at most one block of it. Low-rank updates are merged and dtypes are converted block by block.
Files other than weights are copied from the folder that the model was loaded from.
"""

import itertools
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ligermodels.configs.quantisation import FIELD as QUANTISATION_FIELD
from ligermodels.configs.quantisation import read_scaled, scheme_of
from ligermodels.distributed import is_first
from ligermodels.errors import CheckpointError, InputError
from ligermodels.kernels.quant.fp8 import FP8_BLOCK
from ligermodels.units import size_in_bytes
from ligermodels.weights.bitsandbytes import quantisation_config, tensors_of
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, both_spellings, read_config, with_dtype
from ligermodels.weights.copying import source_tensors, unchanged_tensors, with_copies, write_shards
from ligermodels.weights.files import INDEX_FILE
from ligermodels.weights.loading import float_dtype
from ligermodels.weights.mapping import BASE_LAYER, Piece, Rule, foreign_adapters, plan_pieces
from ligermodels.weights.module import HubModule, LowRankModule
from ligermodels.weights.quantised import fp8_config, fp8_tensors_of, quantised
from ligermodels.weights.reading import safe_file
from ligermodels.weights.sharding import full_tensor, reshard
from ligermodels.weights.stored import StoredTensor
from ligermodels.weights.writing import Blocks, Entry, write_folder, write_json

BLOCK_BYTES = 16 * 2**20
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model*", "tekken.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
COPIED_FILES = (
    GENERATION_CONFIG_FILE, *TOKENIZER_FILES, "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE*", "USE_POLICY*",
)  # fmt: skip
EXPORTED_FILES = (CONFIG_FILE, "*.safetensors", INDEX_FILE, *COPIED_FILES)


class Update(NamedTuple):
    """A low-rank update of one weight matrix, gathered: scale * B_i A_i for each of its parts."""

    parts: tuple[tuple[slice, Tensor, Tensor], ...]  # rows of the weight, A_i [rank, K], B_i [rows, rank]
    scale: float


@torch.no_grad()
def export_weights(
    model: HubModule, folder: str | Path, *, source: str | Path | None = None, dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None, also: Callable[[Path], None] | None = None,
    values: Mapping[str, Tensor] | None = None, copied_files: Iterable[str] = COPIED_FILES, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes `model` to `folder`: weights, config.json, tokenizer files. The folder must be empty or not exist.

    model: if its parameters are DTensors, every rank must call; rank 0 writes, and all return when the folder is
    complete.
    source: the folder that the model was loaded from; its files that match `copied_files` are copied.
    dtype: of the written tensors: float64, float32, float16 or bfloat16; None for the model's. Those that the model
    keeps in fp32 are written no narrower than they were read.
    max_shard_size: bytes of tensors per file, as a number or as "5GB" or "2GiB"; a larger tensor gets its own file. The
    files of `source` are kept if they have the same tensors and none is larger; None for any size, else MAX_SHARD_SIZE.
    also: see `write_folder`.
    values: a state dict with the values to write; None for those of the model. If they are whole, one rank may call.
    overwrite: the folder may also be an earlier export, which stays until the new one is complete.
    Raises CheckpointError if `folder` is in use or cannot be written, or if a value is too large for `dtype`; then
    nothing is left behind. Raises InputError if `dtype` or `max_shard_size` is invalid.
    """
    merges = any(isinstance(module, LowRankModule) for module in model.modules())
    keeps_bits = dtype is None and not merges
    dtype = None if dtype is None else float_dtype(dtype)
    limit = None if max_shard_size is None else size_in_bytes(max_shard_size)
    if adapted := foreign_adapters(name for name, _ in model.named_parameters()):
        raise InputError(f"{adapted[0]} has an adapter of PEFT: merge it first, with merge_and_unload()")
    if values is None:
        reshard(model)
        values = model.stored_tensors()
    buffers = model.stored_buffers()
    values = {**buffers, **values}
    names = list(model.stored_tensors())
    dtypes = {name: dtype or values[name].dtype for name in names}
    dtypes |= {name: buffer.dtype for name, buffer in buffers.items()}
    dtypes |= {name: model.written_dtype(name, dtype or model.dtype) for name in model.fp32_tensors()}
    # Modules that are trained as a whole beside LoRA may be wider than the model.
    dtypes |= {f"{name}.weight": dtype or model.dtype for name in model.modules_to_save}
    parameters = {name: values[name] for name in names}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    rules = layout_of_bits(model, parameters) if keeps_bits else model.export_rules()
    pieces = plan_pieces(shapes, rules)
    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    stored = source_tensors(source, model.stored_otherwise if dtype is None else ())
    in_bits = stored_in_bits(model, parameters, pieces) if keeps_bits else {}
    pieces = [piece for piece in pieces if piece.tensor not in in_bits]
    compared = [piece for piece in pieces if piece.tensor in stored]
    own = {name: parameter.dtype for name, parameter in parameters.items()}
    scheme = read_scaled(model.config.raw)
    unchanged = unchanged_tensors(compared, hub_tensors(model, parameters, compared, own), stored, scheme, sharded)
    if rules in model.quantised_weight_rules() and not quantised(unchanged):
        pieces = plan_pieces(shapes, model.weight_rules())
    copies = unchanged | source_tensors(source, model.kept)
    pieces = [piece for piece in pieces if piece.tensor not in copies]
    planned: list[tuple[Entry, StoredTensor | Tensor | None]] = [
        *((Entry(piece.tensor, dtypes[piece.parameter], piece.shape), None) for piece in pieces),
        *((Entry(name, stored.dtype, stored.shape), stored) for name, stored in copies.items()),
        *((Entry(name, x.dtype, tuple(x.shape)), x) for named in in_bits.values() for name, x in named.items()),
    ]
    tensors = with_copies(planned, hub_tensors(model, parameters, pieces, dtypes))

    if is_first() and any(not isinstance(parameters[piece.parameter], Tensor) for piece in pieces):
        written, remedy = "their dequantised values are written", "export the original model"
        if merges:
            written = "LoRA is merged with the dequantised weights, and each sum is rounded once"
            remedy = "merge the adapter with the original model"
        warnings.warn(
            f"{folder}: the model's weights are quantised: {written}; for the original weights, {remedy}", stacklevel=3
        )

    quantisation = model.config.raw.get(QUANTISATION_FIELD) if quantised(unchanged) else None
    if in_bits:
        quantisation = config_of_bits(model, parameters, pieces)

    def write(temporary: Path) -> None:
        write_shards(temporary, [entry for entry, _ in planned], tensors, source, limit)
        write_config(temporary, model, dtype or model.dtype, source, quantisation)
        if source is not None:
            copy_files(Path(source), temporary, copied_files)

    replaced = EXPORTED_FILES if overwrite else ()
    write_folder(Path(folder).absolute(), write, tensors, sharded, also, replaced)


def hub_weights(
    model: HubModule, dtype: torch.dtype, rules: tuple[Rule, ...] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what an export in this dtype has, one whole tensor after another, on the model's device.

    Names are the Hub's, or those of a layout with other `rules`. Low-rank updates are merged, weights in few bits
    dequantised. If parameters are DTensors, every rank must take all tensors: each parameter is gathered when its turn
    comes.
    """
    reshard(model)
    values = model.stored_tensors()
    as_they_are = model.stored_buffers().keys() | model.fp32_tensors().keys()
    dtypes = {name: value.dtype if name in as_they_are else dtype for name, value in values.items()}
    pieces = plan_pieces({name: value.shape for name, value in values.items()}, rules or model.weight_rules())
    for piece, blocks in zip(pieces, hub_tensors(model, values, pieces, dtypes), strict=True):
        yield piece.tensor, torch.cat(list(blocks))


def layout_of_bits(model: HubModule, parameters: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The layout that an export writes, `export_rules`; if weights were quantised by the tensors of another layout,
    that of `weight_rules`."""
    weights = {name: weight for name, weight in parameters.items() if not isinstance(weight, Tensor)}
    parts: dict[str, list[int]] = {name: [] for name in weights}
    for piece in plan_pieces({name: weight.shape for name, weight in weights.items()}, model.export_rules()):
        parts[piece.parameter].append(math.prod(piece.box_shape[:-1]))
    fits = all(tuple(parts[name]) == weight.parts for name, weight in weights.items())
    return model.export_rules() if fits else model.weight_rules()


def stored_in_bits(
    model: HubModule, parameters: Mapping[str, Any], pieces: Sequence[Piece]
) -> dict[str, dict[str, Tensor]]:
    """The tensors in NF4 or FP8 for each piece of a quantised weight, by its name.

    Weights that were read in FP8 or MXFP4 are not among them: their tensors are copied, as those of a dense model.
    Raises InputError for a piece whose bits a checkpoint cannot have.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, group in itertools.groupby(pieces, key=lambda piece: piece.parameter):
        weight = parameters[name]
        if not isinstance(weight, Tensor) and (weight.scheme == "nf4" or weight.scheme != scheme_of(model.config.raw)):
            parts = weight._replace(data=full_tensor(weight.data)).unpack()
            for piece, part in zip(group, parts, strict=True):
                refuse_unwritable_bits(piece, weight.scheme)
                if "values" in part:  # of a tensor that is not quantised
                    found[piece.tensor] = {piece.tensor: part["values"]}
                elif weight.scheme == "fp8":
                    found[piece.tensor] = fp8_tensors_of(piece.tensor, part)
                else:
                    found[piece.tensor] = tensors_of(piece.tensor, part, piece.shape, weight.dtype)
    return found


def refuse_unwritable_bits(piece: Piece, scheme: str) -> None:
    """Raises InputError if a checkpoint cannot have the bits of a piece."""
    remedy = "give a dtype to write the dequantised weights, or do not quantise the model"
    if piece.view:
        raise InputError(
            f"{piece.tensor}: is quantised in another order than a checkpoint has, so that its bits cannot be written: "
            f"{remedy}"
        )
    if scheme == "fp8" and len(piece.shape) != 2:
        raise InputError(f"{piece.tensor}: stacks experts, and checkpoints in FP8 have matrices alone: {remedy}")


def config_of_bits(model: HubModule, parameters: Mapping[str, Any], others: Sequence[Piece]) -> dict[str, Any]:
    """The quantization_config of a model with weights in NF4 or FP8. others: the pieces that have none."""
    (scheme,) = {weight.scheme for weight in parameters.values() if not isinstance(weight, Tensor)}
    if scheme == scheme_of(model.config.raw):
        return model.config.raw[QUANTISATION_FIELD]
    names = (piece.tensor for piece in others if len(piece.shape) == 2)
    skipped = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    skipped = list(dict.fromkeys([*skipped, "lm_head"]))
    return fp8_config(FP8_BLOCK, skipped) if scheme == "fp8" else quantisation_config(model.dtype, skipped)


def hub_tensors(
    model: HubModule, parameters: Mapping[str, Tensor], pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype]
) -> Iterator[Blocks]:
    """The tensor of each piece as blocks to write, in the dtype of its parameter's entry in `dtypes`. A sharded
    parameter is gathered once for all its pieces."""
    for name, group in itertools.groupby(pieces, key=lambda piece: piece.parameter):
        yield from parameter_tensors(
            full_tensor(parameters[name], model.device), low_rank_updates(model, parameters, name), group, dtypes[name]
        )


def parameter_tensors(
    parameter: Tensor, updates: Sequence[Update], pieces: Iterator[Piece], dtype: torch.dtype
) -> Iterator[Blocks]:
    """The tensors of one gathered parameter. A separate function, so that it is freed before the next is gathered."""
    for piece in pieces:
        blocks = box_blocks(piece, parameter, updates, dtype)
        # Only the whole box can be permuted.
        yield (piece.from_box(torch.cat(list(blocks))) for _ in range(1)) if piece.view else blocks


def box_blocks(piece: Piece, parameter: Tensor, updates: Sequence[Update], dtype: torch.dtype) -> Blocks:
    """The rows of the box of a piece, block by block."""
    if parameter.ndim == 3 and updates:
        of_expert = replace(piece, index=piece.index[1:], shape=piece.shape[-2:])
        matrices = (
            tensor_blocks(of_expert, parameter[expert], updates[expert], dtype)
            for expert in range(piece.index[0].start, piece.index[0].stop)
        )
        if len(piece.shape) == 3:  # rows of the tensor are then whole matrices
            return (torch.cat(list(blocks))[None] for blocks in matrices)
        return itertools.chain.from_iterable(matrices)
    return tensor_blocks(piece, parameter, updates[0] if updates else None, dtype)


def tensor_blocks(piece: Piece, parameter: Tensor, update: Update | None, dtype: torch.dtype) -> Blocks:
    """The rows of a Hub tensor, block by block. An update is added in float64 and rounded once: torch may compute
    float32 products in a lower precision (TF32)."""
    tensor = parameter[piece.index].reshape(piece.box_shape if piece.view else piece.shape)
    step = max(1, BLOCK_BYTES * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), step):
        block = tensor[start : start + step]
        if update is not None:
            block = merge_update(block, piece.index[0].start + start, update)
        yield cast_block(piece.tensor, block, dtype)


def merge_update(rows: Tensor, first: int, update: Update) -> Tensor:
    """Rows of a weight, beginning with row `first`, plus the update of these rows, in float64."""
    rows = rows.to(torch.float64, copy=True)
    last = first + len(rows)
    for updated, a, b in update.parts:
        begin, end = max(first, updated.start), min(last, updated.stop)
        if begin < end:
            overlap = b[begin - updated.start : end - updated.start]
            rows[begin - first : end - first].addmm_(overlap.double(), a.double(), alpha=update.scale)
    return rows


def cast_block(name: str, block: Tensor, dtype: torch.dtype) -> Tensor:
    """The block in another dtype. Raises CheckpointError if a finite value becomes infinite."""
    if block.dtype == dtype:
        return block
    result = block.to(dtype)
    infinite = result.isinf()
    if infinite.any() and block[infinite].isfinite().any():
        largest = torch.finfo(dtype).max
        raise CheckpointError(
            f"{name} holds values larger than {dtype}'s largest, {largest:g}; export as another dtype"
        )
    return result


def low_rank_updates(model: HubModule, values: Mapping[str, Tensor], parameter: str) -> list[Update]:
    """The gathered update of a parameter: one of a matrix, one per expert of a stacked parameter, none without LoRA."""
    owner, found, name = parameter.partition(BASE_LAYER)
    if not found or name.endswith("bias"):
        return []
    if name == "weight":
        module = cast(LowRankModule, model.get_submodule(owner))
        parts = full_tensor(values[f"{owner}.lora_B"]).split([stop - start for start, stop in module.columns])
        a = full_tensor(values[f"{owner}.lora_A"]).split(module.rank)
        rows = [slice(start, stop) for start, stop in module.columns]
        return [Update(tuple(zip(rows, a, parts, strict=True)), module.scale)]
    stacked = cast(LowRankModule, model.get_submodule(f"{owner}.{name}"))
    a, b = (
        full_tensor(values[f"{owner}.{name}.lora_A"]).split(stacked.rank),
        full_tensor(values[f"{owner}.{name}.lora_B"]),
    )
    return [Update(((slice(0, len(b)), a_e, b[:, expert :: len(a)]),), stacked.scale) for expert, a_e in enumerate(a)]


def write_config(
    folder: Path, model: HubModule, dtype: torch.dtype, source: str | Path | None, quantisation: Any
) -> None:
    """Writes config.json; copies the file of `source` unchanged if it already has the right content.

    quantisation: the quantization_config, if the weights are written in few bits; else the field is left out.
    """
    raw = {**model.config.raw, QUANTISATION_FIELD: quantisation}
    if not quantisation:
        raw.pop(QUANTISATION_FIELD)
    if "architectures" not in raw:
        raw = {"architectures": [model.hub_class]} | raw
    wanted = with_dtype(both_spellings(raw, model.config.alternative_names), dtype)
    if source is not None and read_config(source) == wanted:
        shutil.copyfile(Path(source) / CONFIG_FILE, folder / CONFIG_FILE)
    else:
        write_json(folder / CONFIG_FILE, wanted)


def replace_tokenizer(source: Path, folder: Path) -> None:
    """Replaces the folder's tokenizer files by those of `source`, and generation_config.json if `source` has one."""
    for pattern in TOKENIZER_FILES:
        for file in folder.glob(pattern):
            file.unlink()
    copy_files(source, folder, (GENERATION_CONFIG_FILE, *TOKENIZER_FILES))


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copies the content of the files that match. File modes are not copied: they may deny access to other users."""
    for pattern in patterns:
        for file in source.glob(pattern):
            name = str(file.relative_to(source))
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(safe_file(source, name), folder / name)
