"""Which safetensors files an export has: those of the folder that the model was loaded from, or files of our own.

Tensors come in the order of the model, so that each parameter is gathered once, and are written to their places.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ligermodels.errors import CheckpointError
from ligermodels.units import MAX_SHARD_SIZE, size_in_bytes
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, header_bytes, open_checkpoint, read_weight_map
from ligermodels.weights.reading import MAX_JSON_BYTES, read_bytes, safe_file
from ligermodels.weights.writing import Blocks, Entry, block_bytes, safetensors_header, write_json


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
