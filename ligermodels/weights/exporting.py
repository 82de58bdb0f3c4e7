"""A model into a folder that transformers 4 and 5 and vLLM read: the inverse of loading, over the same plan.

No more than one parameter is ever gathered, and no more than a block of it is on the host besides. Low-rank updates
are merged and dtypes converted block by block, on the way. What is not weights is copied from the folder the model was
loaded from. Knows parameters, rules and folders; no family.
"""

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, both_spellings, read_config, with_dtype
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, safe_file
from ligermodels.weights.loading import FLOATS, HubModel
from ligermodels.weights.mapping import BASE_LAYER, Piece, plan
from ligermodels.weights.sharding import reshard, whole
from ligermodels.weights.writing import Blocks, Entry, write_folder, write_json, write_safetensors

MAX_SHARD_SIZE = "5GB"
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", re.IGNORECASE)
BLOCK_BYTES = 16 * 2**20
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model*",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
COPIED = (
    GENERATION_CONFIG_FILE,
    *TOKENIZER_FILES,
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "USE_POLICY*",
)


class LowRankLinear(Protocol):
    """What is asked of a linear with a low-rank update: its `base_layer` has the weight, to which scale * B_i A_i is
    added in the rows that are the i-th of `columns`."""

    columns: tuple[tuple[int, int], ...]  # start, stop
    rank: int
    alpha: float
    scale: float  # alpha / rank
    dropout: float
    lora_A: Tensor  # [P rank, in], one A_i after another
    lora_B: Tensor  # [Σ (stop - start), rank], likewise


class Update(NamedTuple):
    """The pieces of a low-rank update, whole."""

    pieces: tuple[tuple[slice, Tensor, Tensor], ...]  # rows of the weight, A_i [rank, K], B_i [rows, rank]
    scale: float


@torch.no_grad()
def export_weights(
    model: HubModel,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Writes `model` to `folder`, which must be empty or not yet exist: weights, config.json, tokenizer files.

    model: where its parameters are DTensors every rank calls; rank 0 writes, and all return when the folder is there.
    source: the folder the model was loaded from, whose other files are copied.
    dtype: of the tensors as written, float64, float32, float16 or bfloat16; None for the parameters' own.
    max_shard_size: bytes of tensors per file, unless a single one is larger: a number, or as in "5GB" or "2GiB".
    also: as `write_folder`'s.
    Raises CheckpointError where `folder` is in use or cannot be written, or a value is too large for `dtype`; then
    nothing is left behind. InputError where `dtype` or `max_shard_size` is none.
    """
    if dtype is not None and dtype not in FLOATS:
        raise InputError(f"dtype is {dtype}; must be one of {', '.join(map(str, FLOATS))}")
    limit = size_in_bytes(max_shard_size)
    reshard(model)
    # Larger dtypes first, so that every tensor is aligned to its own.
    parameters = dict(sorted(model.named_parameters(), key=lambda item: -item[1].itemsize))
    pieces = plan({name: parameter.shape for name, parameter in parameters.items()}, model.weight_rules())
    entries = [Entry(piece.tensor, dtype or parameters[piece.parameter].dtype, piece.shape) for piece in pieces]
    tensors = hub_tensors(model, parameters, pieces, dtype)

    def write(temporary: Path) -> None:
        write_shards(temporary, entries, tensors, limit)
        write_config(temporary, model, entries[0].dtype, source)
        if source is not None:
            copy_files(Path(source), temporary, COPIED)

    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    write_folder(Path(folder).absolute(), write, tensors, sharded, also)


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, also from "500MB" (10⁶ each) or "2GiB" (2³⁰ each). Raises InputError."""
    found = SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))
    if isinstance(size, str) or size <= 0:
        raise InputError(f"max_shard_size is {size!r}; must be a number of bytes above zero, such as 5GB or 2GiB")
    return size


def hub_tensors(
    model: HubModel, parameters: Mapping[str, Tensor], pieces: Sequence[Piece], dtype: torch.dtype | None
) -> Iterator[Blocks]:
    """The tensor of each piece, as it is written; a sharded parameter is gathered once for all its pieces."""
    for name, group in itertools.groupby(pieces, key=lambda piece: piece.parameter):
        yield from tensors_of(whole(parameters[name]), updates_of(model, name), group, dtype)


def tensors_of(
    parameter: Tensor, updates: Sequence[Update], pieces: Iterator[Piece], dtype: torch.dtype | None
) -> Iterator[Blocks]:
    """Of a whole parameter; a function of its own so that none is held while the next is gathered."""
    for piece in pieces:
        if parameter.ndim == 3 and updates:
            yield itertools.chain.from_iterable(
                blocks_of(one_of(piece), parameter[expert], updates[expert], dtype or parameter.dtype)
                for expert in range(piece.index[0].start, piece.index[0].stop)
            )
        else:
            yield blocks_of(piece, parameter, updates[0] if updates else None, dtype or parameter.dtype)


def one_of(stacked: Piece) -> Piece:
    """What of a piece of a stacked parameter is each matrix's."""
    return replace(stacked, index=stacked.index[1:], shape=stacked.shape[-2:])


def blocks_of(piece: Piece, parameter: Tensor, update: Update | None, dtype: torch.dtype) -> Blocks:
    """The rows of a Hub tensor. An update is added in float64, whatever torch makes of float32, and rounded once."""
    tensor = parameter[piece.index].reshape(piece.shape)
    step = max(1, BLOCK_BYTES * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), step):
        block = tensor[start : start + step]
        if update is not None:
            block = merged(block, piece.index[0].start + start, update)
        yield converted(piece.tensor, block, dtype)


def merged(rows: Tensor, first: int, update: Update) -> Tensor:
    """Rows of a weight from the `first` on, with what the update adds to them, in float64."""
    rows = rows.to(torch.float64, copy=True)
    last = first + len(rows)
    for columns, a, b in update.pieces:
        begin, end = max(first, columns.start), min(last, columns.stop)
        if begin < end:
            part = b[begin - columns.start : end - columns.start]
            rows[begin - first : end - first].addmm_(part.double(), a.double(), alpha=update.scale)
    return rows


def converted(name: str, block: Tensor, dtype: torch.dtype) -> Tensor:
    """Raises CheckpointError where a value becomes infinite."""
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


def updates_of(model: HubModel, parameter: str) -> list[Update]:
    """The update that a parameter has, if any, gathered; of a stacked one that of each of its matrices."""
    owner, found, name = parameter.partition(BASE_LAYER)
    if not found or name == "bias":
        return []
    if name == "weight":
        module: LowRankLinear = model.get_submodule(owner)
        parts = whole(module.lora_B).split([stop - start for start, stop in module.columns])
        a = whole(module.lora_A).split(module.rank)
        rows = [slice(start, stop) for start, stop in module.columns]
        return [Update(tuple(zip(rows, a, parts, strict=True)), module.scale)]
    stacked: LowRankLinear = model.get_submodule(f"{owner}.{name}")
    a, b = whole(stacked.lora_A).split(stacked.rank), whole(stacked.lora_B)
    return [Update(((slice(0, len(b)), a_e, b[:, expert :: len(a)]),), stacked.scale) for expert, a_e in enumerate(a)]


def write_shards(folder: Path, entries: Sequence[Entry], tensors: Iterator[Blocks], max_shard_size: int) -> None:
    shards = split(entries, max_shard_size)
    if len(shards) == 1:
        return write_safetensors(folder / SINGLE_FILE, shards[0], tensors)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, tensors)
        weight_map |= {entry.name: file for entry in shard}
    metadata = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in entries),
        "total_size": sum(entry.nbytes for entry in entries),
    }
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def split(entries: Sequence[Entry], max_shard_size: int) -> list[list[Entry]]:
    """Runs of entries of at most `max_shard_size` bytes each, or of a single larger one."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def write_config(folder: Path, model: HubModel, dtype: torch.dtype, source: str | Path | None) -> None:
    """config.json: the very file of `source` where it already says everything."""
    raw = model.config.raw
    if "architectures" not in raw:
        raw = {"architectures": [model.hub_class]} | raw
    wanted = with_dtype(both_spellings(raw, model.config.alternative_names), dtype)
    if source is not None and read_config(source) == wanted:
        shutil.copyfile(Path(source) / CONFIG_FILE, folder / CONFIG_FILE)
    else:
        write_json(folder / CONFIG_FILE, wanted)


def take_tokenizer(source: Path, folder: Path) -> None:
    """Puts the tokenizer of `source` in place of the folder's own, with how to generate by it where it says so."""
    for pattern in TOKENIZER_FILES:
        for file in folder.glob(pattern):
            file.unlink()
    copy_files(source, folder, (GENERATION_CONFIG_FILE, *TOKENIZER_FILES))


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Their content only: a mode that shuts others out stays behind."""
    for pattern in patterns:
        for file in source.glob(pattern):
            name = str(file.relative_to(source))
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(safe_file(source, name), folder / name)
