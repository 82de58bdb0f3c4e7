"""Which safetensors files an export has, and what it copies byte for byte from the checkpoint that was loaded.

The files are those of that checkpoint's folder, or files of our own. Tensors come in the order of the model, so that
each parameter is gathered once, and are written to their places. Two kinds of tensors are copied: those that the model
does not compute, and those that are stored in another dtype than most, as long as the parameter still has their values.
Quantised tensors are of the second kind: their scales are not unique, so a changed one cannot be quantised as before.
If one of them has changed, none is copied, because readers expect one format for a whole model.
"""

import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.configs.quantisation import Scaled
from ligermodels.distributed import from_first, is_first, raise_on_all
from ligermodels.errors import CheckpointError, InputError, printable
from ligermodels.units import MAX_SHARD_SIZE, size_in_bytes
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, header_bytes, open_checkpoint, read_weight_map
from ligermodels.weights.loading import read_scales
from ligermodels.weights.mapping import Piece
from ligermodels.weights.quantised import Scale, by_element, companions, needs_scale, quantised
from ligermodels.weights.reading import MAX_JSON_BYTES, read_bytes, safe_file
from ligermodels.weights.stored import StoredTensor
from ligermodels.weights.streaming import BUFFER_BYTES, Transfer, open_data_files, run_transfers
from ligermodels.weights.writing import Blocks, Entry, block_bytes, failure, safetensors_header, write_json


def source_tensors(source: str | Path | None, names: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors `names` of the folder `source`, in order, and those that belong to quantised ones among them. Raises
    InputError without a folder, CheckpointError if it does not hold them."""
    names = list(names)
    if not names:
        return {}
    if source is None:
        raise InputError(f"{names[0]} is copied from the folder that the model was loaded from: pass it as source")
    tensors = open_checkpoint(source).tensors
    missing = next((name for name in names if name not in tensors), None)
    if missing is not None:
        raise CheckpointError(f"{source}: tensor {missing}, which an export copies, is missing; restore the folder")
    return with_companions({name: tensors[name] for name in names}, tensors)


def with_companions(chosen: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The chosen ones of the tensors, and the scales of those that are quantised."""
    belonging = (name for tensor in quantised(chosen) for name in companions(tensor) if name in tensors)
    return {**chosen, **{name: tensors[name] for name in belonging}}


def unchanged_tensors(
    pieces: Sequence[Piece], blocks: Iterator[Blocks], stored: Mapping[str, StoredTensor], scheme: Scaled | None,
    sharded: bool,
) -> dict[str, StoredTensor]:  # fmt: skip
    """Finds the stored tensors whose values the model still has; quantised ones only if all of them are unchanged.

    pieces, blocks: the pieces of the stored tensors, and the model's values of each; an iterator of collectives if the
    parameters are sharded, so that every rank must call. Warns if quantised tensors have changed.
    """
    unchanged: list[str] = []

    def compare() -> None:
        scales, elements = read_scales(stored, scheme), by_element(stored, scheme)
        for piece, value in zip(pieces, blocks, strict=False):
            if is_unchanged(piece.tensor, elements[piece.tensor], scales.get(piece.tensor), value):
                unchanged.append(piece.tensor)

    error = failure(compare) if is_first() or not sharded else None
    deque(blocks, maxlen=0)  # takes part in the remaining gathers
    if sharded:
        raise_on_all(error)
        unchanged = from_first(unchanged)
    elif error is not None:
        raise error
    changed = [name for name in quantised(stored) if name not in unchanged]
    if changed and is_first():
        file = stored[changed[0]].file
        warnings.warn(printable(f"{file}: {changed[0]} has changed: no weight is written quantised"), stacklevel=3)
    copied = [name for name in unchanged if not changed or not needs_scale(name, stored[name])]
    return with_companions({name: stored[name] for name in copied}, stored)


def with_copies(
    planned: Iterable[tuple[Entry, StoredTensor | Tensor | None]], gathered: Iterator[Blocks]
) -> Iterator[Blocks]:
    """The tensors of `planned` in order: stored ones from their files, given ones, and the others from the iterator."""
    for entry, stored in planned:
        if isinstance(stored, Tensor):
            yield (stored,)
        else:
            yield next(gathered) if stored is None else stored_blocks(stored, entry.name)


def is_unchanged(name: str, stored: StoredTensor, scale: Scale | None, blocks: Blocks) -> bool:
    """Whether a parameter's blocks of rows have the values of a stored tensor, each rounded to the blocks' dtype."""
    start = 0
    for block in blocks:
        rows = block.shape[0] if block.dim() else 1
        sides = (slice(start, start + rows), *(slice(0, size) for size in stored.shape[1:])) if stored.shape else ()
        value = torch.empty(block.shape, dtype=block.dtype, device="cpu")
        run_transfers([Transfer(name, stored, sides, value, scale)], "", quiet=True)
        if not torch.equal(bits(value), bits(block)):
            return False
        start += rows
    return True


def bits(block: Tensor) -> Tensor:
    return block.cpu().flatten().view(torch.uint8)


def stored_blocks(stored: StoredTensor, name: str) -> Blocks:
    with open_data_files({stored.file}) as files:
        for start in range(0, stored.nbytes, BUFFER_BYTES):
            block = torch.empty(min(BUFFER_BYTES, stored.nbytes - start), dtype=torch.uint8, device="cpu")
            files[stored.file].read(name, [(stored.begin + start, block.numel())], block)
            yield block


class ShardFile(NamedTuple):
    """A file to write. begins: where each of its tensors begins, in bytes from the start of the file."""

    name: str
    header: bytes
    begins: Mapping[str, int]


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterator[Blocks], source: str | Path | None,
    max_shard_size: int | None,
) -> None:  # fmt: skip
    """Writes one safetensors file, or several with their index: those of `source` if their tensors have these names,
    dtypes and shapes, byte for byte where the values are the same.

    entries: one for each of the `tensors`, in the same order. max_shard_size: None for that of the source's files.
    """
    files = own_files(entries, max_shard_size or size_in_bytes(MAX_SHARD_SIZE))
    of_source, index_source = files_of_source(source, entries, max_shard_size), None
    if of_source and (max_shard_size is None or len(of_source) == len(files)):
        files, index_source = of_source, source
    weight_map = {name: file.name for file in files for name in file.begins}
    if set(weight_map.values()) != {SINGLE_FILE}:
        write_shard_index(folder, entries, weight_map, index_source)
    places = {name: begin for file in files for name, begin in file.begins.items()}
    for file in files:
        (folder / file.name).write_bytes(file.header)
    for entry, blocks in zip(entries, tensors, strict=False):
        with (folder / weight_map[entry.name]).open("r+b") as stream:
            stream.seek(places[entry.name])
            for block in blocks:
                stream.write(block_bytes(block))


def files_of_source(source: str | Path | None, entries: Iterable[Entry], limit: int | None) -> list[ShardFile]:
    """The files of the folder; none if their tensors have other names, dtypes or shapes, or if one is too large."""
    try:
        checkpoint = None if source is None else open_checkpoint(source)
    except CheckpointError:  # a folder that has no weights, or has them no more
        return []
    if checkpoint is None or checkpoint.converted:
        return []
    stored = checkpoint.tensors
    if {Entry(name, of.dtype, of.shape) for name, of in stored.items()} != set(entries):
        return []
    groups: dict[Path, dict[str, int]] = defaultdict(dict)
    sizes: dict[Path, int] = defaultdict(int)
    for name, of in stored.items():
        groups[of.file][name] = of.begin
        sizes[of.file] += of.nbytes
    if limit is not None and any(sizes[file] > limit and len(begins) > 1 for file, begins in groups.items()):
        return []
    return [ShardFile(file.name, header_bytes(file), begins) for file, begins in groups.items()]


def own_files(entries: Iterable[Entry], max_shard_size: int) -> list[ShardFile]:
    """Files with the tensors in the order in which the safetensors library writes them."""
    shards = split_into_shards(sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)), max_shard_size)
    if len(shards) == 1:
        return [ShardFile(SINGLE_FILE, *safetensors_header(shards[0]))]
    return [
        ShardFile(f"model-{number:05d}-of-{len(shards):05d}.safetensors", *safetensors_header(shard))
        for number, shard in enumerate(shards, start=1)
    ]


def write_shard_index(
    folder: Path, entries: Sequence[Entry], weight_map: Mapping[str, str], source: str | Path | None
) -> None:
    """Writes the index; copies that of `source` if it says the same."""
    if source is not None and read_weight_map(Path(source)) == weight_map:
        (folder / INDEX_FILE).write_bytes(read_bytes(safe_file(Path(source), INDEX_FILE), MAX_JSON_BYTES))
        return
    metadata = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in entries),
        "total_size": sum(entry.nbytes for entry in entries),
    }
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def split_into_shards(entries: Sequence[Entry], max_shard_size: int) -> list[list[Entry]]:
    """Groups consecutive entries into shards of at most `max_shard_size` bytes; a larger entry is a shard by itself."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards
