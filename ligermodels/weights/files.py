"""Safe reading of a checkpoint folder: model.safetensors, or the shards that model.safetensors.index.json names.

Every byte of a folder may be damaged or hostile. Paths, JSON and safetensors headers are checked here, before anything
is mapped or allocated; pickles are never opened. Knows the file formats only: no model, no rule, no Hub.

safetensors (https://github.com/huggingface/safetensors#format): the header's length as 8 little-endian bytes, the
header (a JSON object: name -> dtype, shape, data_offsets), then the tensors without gap or overlap.
"""

import hashlib
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
MAX_DEPTH = 100
HASHED_BYTES = 4 * 2**20  # at a time
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
AGAIN = "download it again"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. begin: bytes from the start of its file's data."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by their Hub names. Holds no file open."""

    folder: Path
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads and checks all headers of a folder; the tensors stay on disk. Raises CheckpointError."""
    folder = Path(folder)
    if (folder / SINGLE_FILE).exists():
        return Checkpoint(folder, read_header(safe_file(folder, SINGLE_FILE)))
    if (folder / INDEX_FILE).exists():
        return Checkpoint(folder, read_shards(folder))
    pickles = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(f"{folder / pickles[0]}: pickles can run code and are not read; convert to safetensors")
    raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; is it a model's folder?")


def read_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors that the index names; others in the shards are not part of the checkpoint."""
    index, weight_map = folder / INDEX_FILE, read_weight_map(folder)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        raise CheckpointError(f"{index}: names files that are missing: {', '.join(absent)}; download them again")
    headers = {shard: read_header(safe_file(folder, shard)) for shard in shards}
    misplaced = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if misplaced:
        raise CheckpointError(f"{index}: its files do not hold {shortened(misplaced)}; download the folder again")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def read_weight_map(folder: Path) -> dict[str, str]:
    """The index: which file of the folder holds which tensor. The files need not be there. Raises CheckpointError."""
    index = folder / INDEX_FILE
    weight_map = read_json(safe_file(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is not an object of file names by tensor; {AGAIN}")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map names {shard!r}, not a .safetensors file of the same folder")
    return weight_map


def tensor_hashes(folder: str | Path) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, by its Hub name, in hexadecimal. Raises CheckpointError."""
    return {name: hash_of(stored) for name, stored in open_checkpoint(folder).tensors.items()}


def hash_of(stored: StoredTensor) -> str:
    digest = hashlib.sha256()
    with stored.file.open("rb") as stream:
        data = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(data + stored.begin)
        left = math.prod(stored.shape) * stored.dtype.itemsize
        while left:
            block = stream.read(min(left, HASHED_BYTES))
            if not block:
                raise CheckpointError(f"{stored.file}: truncated while it was read; {AGAIN}")
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def safe_file(folder: Path, name: str) -> Path:
    """The path of a regular file below the folder. Links may lead out only to the blobs of the Hub's own cache.

    They lie in `blobs/` of the repository, or, from huggingface_hub 2 on, in `blobs/ab/` of the whole cache.
    """
    file, home = folder / name, folder.resolve()
    if not file.is_file():
        raise CheckpointError(f"{file}: is missing or not a regular file; {AGAIN}")
    target = file.resolve()
    repository = home.parent.parent
    blobs = (target.parent == repository / "blobs", target.parent.parent == repository.parent / "blobs")
    if not target.is_relative_to(home) and not (home.parent.name == "snapshots" and any(blobs)):
        raise CheckpointError(f"{file}: is a link that leads out of the folder, to {target}; put the file in its place")
    return file


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, after checking that they fill its data exactly."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        refuse_text(file, stream.read(64))
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise CheckpointError(f"{file}: {size} bytes are too few for a safetensors header; {AGAIN}")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: header of {length} bytes, more than {MAX_HEADER_BYTES}; not safetensors")
        if length > size - 8:
            raise CheckpointError(f"{file}: truncated within its header, {size} of {8 + length} bytes; {AGAIN}")
        header = parse_json(stream.read(length), file)
    header.pop("__metadata__", None)
    spans = {name: checked_entry(file, name, entry) for name, entry in header.items()}
    refuse_gaps(file, {name: (begin, end) for name, (_, begin, end) in spans.items()}, size - 8 - length)
    return {name: tensor for name, (tensor, _, _) in spans.items()}


def refuse_text(file: Path, start: bytes) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file}: is a Git LFS pointer, not the weights; run `git lfs pull`")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{file}: is a web page, not the weights; {AGAIN}")


def checked_entry(file: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if all(
            type(n) is int and n >= 0 for n in (*shape, begin, end)
        ):
            pass
        case _:
            raise CheckpointError(f"{file}: tensor {name} lacks a valid dtype, shape or data_offsets; {AGAIN}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; supported: {', '.join(DTYPES)}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise CheckpointError(f"{file}: tensor {name} needs {needed} bytes, data_offsets give {end - begin}; {AGAIN}")
    return StoredTensor(file, DTYPES[dtype], tuple(shape), begin), begin, end


def refuse_gaps(file: Path, spans: Mapping[str, tuple[int, int]], size: int) -> None:
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            fault = "overlaps the one before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {name} {fault} (data_offsets {begin} to {end}); {AGAIN}")
        if end > size:
            raise CheckpointError(f"{file}: truncated: tensor {name} ends at byte {end} of {size} of data; {AGAIN}")
        position = end
    if position != size:
        raise CheckpointError(f"{file}: {size - position} bytes after the last tensor; {AGAIN}")


def read_json(file: Path) -> dict[str, Any]:
    return parse_json(file.read_bytes(), file)


def parse_json(data: bytes, file: Path, *, may_be_huge: Container[str] = ()) -> dict[str, Any]:
    """A JSON object whose numbers are finite and fit 64 bits, but for the fields named, which may be infinite.

    Raises CheckpointError naming the file and the field.
    """
    try:
        # A number too long for 64 bits becomes infinite, to be found with its name below.
        value = json.loads(data.decode(), parse_int=lambda digits: int(digits) if len(digits) <= 20 else math.inf)
        wild = [field for field, number in numbers(value) if not fits_64_bits(number) and field not in may_be_huge]
    except RecursionError:
        raise CheckpointError(f"{file}: field {deepest_field(data.decode())} is nested too deeply; {AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}; {AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; {AGAIN}")
    if wild:
        raise CheckpointError(f"{file}: field {wild[0]} is not a finite number of 64 bits; correct it")
    return value


def fits_64_bits(number: int | float) -> bool:
    return -(2**63) <= number < 2**63 if isinstance(number, int) else math.isfinite(number)


def numbers(value: Any, field: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number of a JSON value with its place, such as `rope_scaling.factor` or `eos_token_id[1]`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, f"{field}[{index}]")
    elif isinstance(value, int | float):
        yield field, value


def deepest_field(text: str) -> str:
    """The outermost field within which brackets nest deeper than MAX_DEPTH: the last string before they open."""
    depth, field = 0, ""
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            break
        if depth == 1 and token[0].startswith('"'):
            field = token[0]
    return field


def shortened(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message: the first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
