"""A model into a folder that transformers 4 and 5 and vLLM read: the inverse of loading, over the same plan.

Weights are written one parameter at a time, so that no more than the largest one is ever gathered or copied to the
host. Everything is written beside the final name, synced, then renamed: a folder is complete or is not there. What is
not weights is copied from the folder the model was loaded from. Knows parameters, rules and folders; no family.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from ligermodels.errors import CheckpointError
from ligermodels.weights.config_file import CONFIG_FILE, both_spellings, read_config, with_dtype
from ligermodels.weights.files import DTYPES, INDEX_FILE, SINGLE_FILE, safe_file
from ligermodels.weights.loading import HubModel
from ligermodels.weights.mapping import Piece, plan

MAX_SHARD_BYTES = 5 * 10**9
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "LICENSE*",
    "USE_POLICY*",
)


@torch.no_grad()
def export_weights(
    model: HubModel,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    max_shard_size: int = MAX_SHARD_BYTES,
) -> None:
    """Writes `model` to `folder`, which must be empty or not yet exist: weights, config.json, tokenizer files.

    model: where its parameters are DTensors every rank calls; rank 0 writes, and all return when the folder is there.
    source: the folder the model was loaded from, whose other files are copied.
    max_shard_size: bytes of tensors per file, unless a single one is larger.
    Raises CheckpointError where `folder` is in use or cannot be written; then nothing is left behind.
    """
    folder = Path(folder).absolute()
    # Larger dtypes first, so that every tensor is aligned to its own.
    parameters = dict(sorted(model.named_parameters(), key=lambda item: -item[1].itemsize))
    pieces = plan({name: parameter.shape for name, parameter in parameters.items()}, model.weight_rules())
    tensors = hub_tensors(parameters, pieces)
    if distributed.is_initialized() and distributed.get_rank() > 0:
        for _ in tensors:  # takes part in gathering
            pass
    else:
        with committed(folder) as temporary:
            write_shards(temporary, parameters, pieces, tensors, max_shard_size)
            write_config(temporary, model, next(iter(parameters.values())).dtype, source)
            if source is not None:
                copy_files(Path(source), temporary)
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        distributed.barrier()


def hub_tensors(parameters: Mapping[str, Tensor], pieces: Sequence[Piece]) -> Iterator[Tensor]:
    """The tensor of each piece, on its parameter's device; a sharded parameter is gathered once for all its pieces."""
    for name, group in itertools.groupby(pieces, key=lambda piece: piece.parameter):
        parameter = parameters[name]
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for piece in group:
            yield whole[piece.index].reshape(piece.shape)


@contextmanager
def committed(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` if all went well and is removed otherwise."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists and is not an empty folder; export to another, or remove it")
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(0o644)
            sync(file)
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: not written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shards(
    folder: Path,
    parameters: Mapping[str, Tensor],
    pieces: Sequence[Piece],
    tensors: Iterator[Tensor],
    max_shard_size: int,
) -> None:
    entries = [(piece, parameters[piece.parameter].dtype) for piece in pieces]
    shards = split(entries, max_shard_size)
    if len(shards) == 1:
        return write_safetensors(folder / SINGLE_FILE, shards[0], tensors)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, tensors)
        weight_map |= {piece.tensor: file for piece, _ in shard}
    metadata = {
        "total_parameters": sum(parameter.numel() for parameter in parameters.values()),
        "total_size": sum(size_of(entry) for entry in entries),
    }
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


Entry = tuple[Piece, torch.dtype]


def size_of(entry: Entry) -> int:
    piece, dtype = entry
    return torch.Size(piece.shape).numel() * dtype.itemsize


def split(entries: Sequence[Entry], max_shard_size: int) -> list[list[Entry]]:
    """Runs of entries of at most `max_shard_size` bytes each, or of a single larger one."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + size_of(entry) > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size_of(entry)
    return shards


def write_safetensors(file: Path, entries: Sequence[Entry], tensors: Iterator[Tensor]) -> None:
    """One safetensors file of the next tensors of the iterator, one in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it, older readers refuse the file
    end = 0
    for piece, dtype in entries:
        begin, end = end, end + size_of((piece, dtype))
        header[piece.tensor] = {"dtype": DTYPE_NAMES[dtype], "shape": piece.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in zip(entries, tensors, strict=False):
            stream.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> bytearray:
    """A tensor's elements in row order, from whatever device, without numpy."""
    buffer = bytearray(tensor.nbytes)
    if buffer:
        torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return buffer


def write_config(folder: Path, model: HubModel, dtype: torch.dtype, source: str | Path | None) -> None:
    """config.json: the very file of `source` where it already says everything."""
    raw = model.config.raw
    if "architectures" not in raw:
        raw = {"architectures": [model.hub_class]} | raw
    wanted = with_dtype(both_spellings(raw, model.config.also_named), dtype)
    if source is not None and read_config(source) == wanted:
        shutil.copyfile(Path(source) / CONFIG_FILE, folder / CONFIG_FILE)
    else:
        write_json(folder / CONFIG_FILE, wanted)


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_files(source: Path, folder: Path) -> None:
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(safe_file(source, file.name), folder / file.name)
