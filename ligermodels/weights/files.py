"""Reads a checkpoint folder safely: model.safetensors, or the shards that model.safetensors.index.json names, or GGUF.

Every byte of a folder may be damaged or hostile. Safetensors headers are validated before memory is allocated for what
they describe. Pickles are never opened.

safetensors (https://github.com/huggingface/safetensors#format): the header's length as 8 little-endian bytes, the
header (a JSON object: name -> dtype, shape, data_offsets), then the tensors without gap or overlap.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ligermodels.errors import CheckpointError, shorten
from ligermodels.weights.gguf.header import read_gguf_header
from ligermodels.weights.gguf.names import gguf_files
from ligermodels.weights.gguf.tensors import open_gguf
from ligermodels.weights.reading import (
    DOWNLOAD_AGAIN,
    MAX_JSON_BYTES,
    open_for_reading,
    parse_json,
    read_json,
    refuse_text,
    safe_file,
    weights_file,
)
from ligermodels.weights.stored import Checkpoint, StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HASH_BLOCK_BYTES = 4 * 2**20
COMPARED_BYTES = 4096  # of each tensor, to tell models apart
MAX_FILE_NAME_BYTES = 255  # the limit of file systems; pathlib raises an error for a longer name
MAX_DIMENSIONS = 64  # torch's limit
MAX_SHOWN_CHARACTERS = 100  # of a value in an error
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads and validates all headers of a folder; the tensors stay on disk. Raises CheckpointError.

    If the folder has both a single file and an index, the single file is used, as in transformers. A GGUF file is read
    if the folder has neither.
    """
    folder = Path(folder)
    if os.path.lexists(folder / SINGLE_FILE):
        return Checkpoint(folder, read_header(weights_file(folder, SINGLE_FILE)))
    if os.path.lexists(folder / INDEX_FILE):
        return Checkpoint(folder, read_shards(folder))
    if gguf := gguf_files(folder):  # in the folder that shows a file they are links to it, by which errors name it
        return open_gguf(read_gguf_header([folder / file.readlink() if file.is_symlink() else file for file in gguf]))
    pickles = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(f"{folder / pickles[0]}: pickles can run code and are not read; convert to safetensors")
    raise CheckpointError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; is it a model folder?")


def read_shards(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the files that the index names, including tensors that the index itself does not list."""
    index, weight_map = folder / INDEX_FILE, read_weight_map(folder)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not os.path.exists(folder / shard)]
    if absent:
        raise CheckpointError(f"{index}: names files that are missing: {', '.join(absent)}; download them again")
    headers = {shard: read_header(weights_file(folder, shard)) for shard in shards}
    misplaced = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if misplaced:
        raise CheckpointError(f"{index}: its files do not hold {shortened(misplaced)}; download the folder again")
    tensors: dict[str, StoredTensor] = {}
    for header in headers.values():
        for name in header.keys() & tensors.keys():
            both = f"{tensors[name].file.name} and {header[name].file.name}"
            raise CheckpointError(f"{index}: its files {both} both hold tensor {name}; download the folder again")
        tensors |= header
    return tensors


def read_weight_map(folder: Path) -> dict[str, str]:
    """The index: the file of each tensor, by name. The files need not exist. Raises CheckpointError."""
    index = folder / INDEX_FILE
    weight_map = read_json(safe_file(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is not an object of file names by tensor; {DOWNLOAD_AGAIN}")
    if not weight_map:
        raise CheckpointError(f"{index}: weight_map names no tensor; {DOWNLOAD_AGAIN}")
    for shard in sorted(set(weight_map.values())):
        too_long = len(shard.encode("utf-8", "surrogatepass")) > MAX_FILE_NAME_BYTES
        if (
            Path(shard).name != shard
            or "\\" in shard
            or not shard.endswith(".safetensors")
            or too_long
            or not shard.isprintable()
        ):
            raise CheckpointError(f"{index}: weight_map names {shard!r}, not a .safetensors file of the same folder")
    return weight_map


def weights_fingerprint(folder: Path) -> str:
    """A hash of the names, dtypes, shapes and first bytes, which training changes, of a folder's tensors. Raises
    CheckpointError."""
    digest = hashlib.sha256()
    for name, stored in sorted(open_checkpoint(folder).tensors.items()):
        digest.update(f"{name} {stored.dtype} {list(stored.shape)} ".encode())
        digest.update(first_bytes(stored))
    return digest.hexdigest()


def first_bytes(stored: StoredTensor) -> bytes:
    with open_for_reading(stored.file) as stream:
        stream.seek(stored.begin)
        return stream.read(min(stored.nbytes, COMPARED_BYTES))


def tensor_hashes(folder: str | Path) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, by its Hub name, in hexadecimal. Raises CheckpointError."""
    return {name: sha256_of(stored) for name, stored in open_checkpoint(folder).tensors.items()}


def sha256_of(stored: StoredTensor) -> str:
    """The SHA-256 of a tensor's bytes, in hexadecimal. Raises CheckpointError."""
    digest = hashlib.sha256()
    with open_for_reading(stored.file) as stream:
        stream.seek(stored.begin)
        left = stored.nbytes
        while left:
            block = stream.read(min(left, HASH_BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{stored.file}: truncated while it was read; {DOWNLOAD_AGAIN}")
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, after checking that they fill its data exactly. Raises CheckpointError."""
    with open_for_reading(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        refuse_text(file, stream.read(64))
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise CheckpointError(f"{file}: {size} bytes are too few for a safetensors header; {DOWNLOAD_AGAIN}")
        if length > MAX_JSON_BYTES:
            raise CheckpointError(f"{file}: header of {length} bytes, more than {MAX_JSON_BYTES}; not safetensors")
        if length > size - 8:
            raise CheckpointError(
                f"{file}: truncated within its header, {size} of {8 + length} bytes; {DOWNLOAD_AGAIN}"
            )
        header = parse_json(stream.read(length), file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ is not an object of strings; {DOWNLOAD_AGAIN}")
    tensors = {name: parse_entry(file, name, entry) for name, entry in header.items()}
    refuse_gaps(file, tensors, size - 8 - length)
    return {name: replace(stored, begin=8 + length + stored.begin) for name, stored in tensors.items()}


def header_bytes(file: Path) -> bytes:
    """What a safetensors file begins with: its header, which `read_header` has validated, and the length of it."""
    with open_for_reading(file) as stream:
        length = stream.read(8)
        return length + stream.read(int.from_bytes(length, "little"))


def parse_entry(file: Path, name: str, entry: Any) -> StoredTensor:
    """A tensor's entry in the header of its file, with its offset from the start of the data. Raises CheckpointError
    naming file, tensor and field."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name} has dtype {header_value(dtype)}; supported: {', '.join(SAFETENSORS_DTYPES)}"
        )
    if not is_list_of_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {header_value(shape)}, not a list of at most 64 sizes; {DOWNLOAD_AGAIN}"
        )
    if not is_list_of_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name} has data_offsets {header_value(offsets)}, not a begin and an end; {DOWNLOAD_AGAIN}"
        )
    stored = StoredTensor(file, SAFETENSORS_DTYPES[dtype], tuple(shape), offsets[0])
    if stored.begin + stored.nbytes != offsets[1]:
        given = f"data_offsets {offsets} give {offsets[1] - offsets[0]}"
        raise CheckpointError(f"{file}: tensor {name} needs {stored.nbytes} bytes, {given}; {DOWNLOAD_AGAIN}")
    return stored


def header_value(value: Any) -> str:
    """A value of a header as an error shows it."""
    return shorten(str(value), MAX_SHOWN_CHARACTERS)


def is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def refuse_gaps(file: Path, tensors: Mapping[str, StoredTensor], size: int) -> None:
    """Raises CheckpointError unless the tensors fill the data without gap or overlap. size: bytes of the data."""
    position = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        begin, end = stored.begin, stored.begin + stored.nbytes
        if begin != position:
            fault = "overlaps the previous one" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {name} {fault} (data_offsets {begin} to {end}); {DOWNLOAD_AGAIN}")
        if end > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {name} ends at byte {end} of {size} (data_offsets); {DOWNLOAD_AGAIN}"
            )
        position = end
    if position != size:
        raise CheckpointError(f"{file}: {size - position} bytes after the last tensor; {DOWNLOAD_AGAIN}")


def shortened(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message: the first `limit`, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
