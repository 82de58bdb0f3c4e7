"""Reads a checkpoint folder safely: model.safetensors, or the shards that model.safetensors.index.json names.

Every byte of a folder may be damaged or hostile. Paths, JSON and safetensors headers are validated before memory is
allocated for what they describe. Pickles are never opened. Knows the file formats only; must not know models, rules or
the Hub.

safetensors (https://github.com/huggingface/safetensors#format): the header's length as 8 little-endian bytes, the
header (a JSON object: name -> dtype, shape, data_offsets), then the tensors without gap or overlap.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ligermodels.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HASH_BLOCK_BYTES = 4 * 2**20
MAX_JSON_BYTES = 100_000_000  # the safetensors library's limit for a header; also used for all other JSON
MAX_JSON_VALUES = 1_000_000  # a tensor's header entry has seven, so a file can have 140,000 tensors
MAX_JSON_DEPTH = 100
MAX_DIMENSIONS = 64  # torch's limit
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DOWNLOAD_AGAIN = "download it again"

SAFETENSORS_DTYPES = {
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
    """A tensor in a file. begin: its offset in bytes from the start of the file's data."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by their Hub names. It keeps no file open."""

    folder: Path
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads and validates all headers of a folder; the tensors stay on disk. Raises CheckpointError.

    If the folder has both a single file and an index, the single file is used, as in transformers.
    """
    folder = Path(folder)
    if os.path.lexists(folder / SINGLE_FILE):
        return Checkpoint(folder, read_header(safe_file(folder, SINGLE_FILE)))
    if os.path.lexists(folder / INDEX_FILE):
        return Checkpoint(folder, read_shards(folder))
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
    headers = {shard: read_header(safe_file(folder, shard)) for shard in shards}
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
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map names {shard!r}, not a .safetensors file of the same folder")
    return weight_map


def tensor_hashes(folder: str | Path) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, by its Hub name, in hexadecimal. Raises CheckpointError."""
    return {name: sha256_of(stored) for name, stored in open_checkpoint(folder).tensors.items()}


def sha256_of(stored: StoredTensor) -> str:
    """The SHA-256 of a tensor's bytes, in hexadecimal. Raises CheckpointError."""
    digest = hashlib.sha256()
    with open_for_reading(stored.file) as stream:
        data = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(data + stored.begin)
        left = stored.nbytes
        while left:
            block = stream.read(min(left, HASH_BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{stored.file}: truncated while it was read; {DOWNLOAD_AGAIN}")
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def safe_file(folder: Path, name: str) -> Path:
    """The path of a regular file in the folder. The file is not opened, because opening a pipe would block.

    A symbolic link may leave the folder only for the blobs of the Hub's cache: `blobs/` of the repository or, since
    huggingface_hub 2, `blobs/ab/` of the whole cache. Raises CheckpointError.
    """
    file, home = folder / name, folder.resolve()
    if not os.path.isfile(file):
        fault = "is a broken link" if os.path.islink(file) and not os.path.exists(file) else "is not a regular file"
        raise CheckpointError(f"{file}: {fault if os.path.lexists(file) else 'is missing'}; {DOWNLOAD_AGAIN}")
    target, repository = file.resolve(), home.parent.parent
    cached = target.parent == repository / "blobs" or target.parent.parent == repository.parent / "blobs"
    if not target.is_relative_to(home) and not (home.parent.name == "snapshots" and cached):
        raise CheckpointError(f"{file}: is a link that leads out of the folder, to {target}; replace it by the file")
    return file


@contextmanager
def open_for_reading(file: Path) -> Iterator[BufferedReader]:
    """The file, open for reading bytes.

    Raises CheckpointError if it is not a regular file, or if the system reports an error.
    """
    try:
        with open(file, "rb", opener=open_without_waiting) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise CheckpointError(f"{file}: is not a regular file; replace it by the file, or remove it")
            yield stream
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error.strerror}; check its permissions and its disk"
        ) from error


def open_without_waiting(path: str, flags: int) -> int:
    """Opens a file. Opening a pipe does not wait until a process writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


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
    return tensors


def refuse_text(file: Path, start: bytes) -> None:
    """Raises CheckpointError if the file begins like a Git LFS pointer or a web page."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file}: is a Git LFS pointer in place of the file; run `git lfs pull`")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{file}: is a web page in place of the file; {DOWNLOAD_AGAIN}")


def parse_entry(file: Path, name: str, entry: Any) -> StoredTensor:
    """A tensor's entry in the header of its file. Raises CheckpointError naming file, tensor and field."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; supported: {', '.join(SAFETENSORS_DTYPES)}")
    if not is_list_of_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {shape}, not a list of at most 64 sizes; {DOWNLOAD_AGAIN}"
        )
    if not is_list_of_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name} has data_offsets {offsets}, not a begin and an end; {DOWNLOAD_AGAIN}"
        )
    stored = StoredTensor(file, SAFETENSORS_DTYPES[dtype], tuple(shape), offsets[0])
    if stored.end != offsets[1]:
        given = f"data_offsets {offsets} give {offsets[1] - offsets[0]}"
        raise CheckpointError(f"{file}: tensor {name} needs {stored.nbytes} bytes, {given}; {DOWNLOAD_AGAIN}")
    return stored


def is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def refuse_gaps(file: Path, tensors: Mapping[str, StoredTensor], size: int) -> None:
    """Raises CheckpointError unless the tensors fill the data without gap or overlap. size: bytes of the data."""
    position = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        begin, end = stored.begin, stored.end
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


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of at most MAX_JSON_BYTES. Raises CheckpointError as parse_json does."""
    with open_for_reading(file) as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: more than {MAX_JSON_BYTES} bytes of JSON are not read; {DOWNLOAD_AGAIN}")
    refuse_text(file, data[:64])
    return parse_json(data, file)


def parse_json(data: bytes, file: Path, *, may_be_huge: Container[str] = ()) -> dict[str, Any]:
    """Parses a JSON object of bounded size and depth. Fields must be unique; numbers must be finite and fit 64 bits.

    may_be_huge: fields whose numbers may be larger; they are parsed as infinity.
    Raises CheckpointError naming the file and the field.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))  # an upper bound, known before parsing
    if values > MAX_JSON_VALUES:
        raise CheckpointError(f"{file}: {values} JSON values, more than {MAX_JSON_VALUES}; {DOWNLOAD_AGAIN}")
    repeated: list[str] = []

    def fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            repeated.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return fields

    try:
        # An integer that is too long for 64 bits becomes infinite; walk_numbers below finds it with its field name.
        value = json.loads(
            data.decode(),
            parse_int=lambda digits: int(digits) if len(digits) <= 20 else math.inf,
            object_pairs_hook=fields_once,
        )
        wild = [field for field, number in walk_numbers(value) if not fits_64_bits(number) and field not in may_be_huge]
    except RecursionError:
        raise CheckpointError(
            f"{file}: field {deepest_field(data.decode())} is nested too deeply; {DOWNLOAD_AGAIN}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}; {DOWNLOAD_AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; {DOWNLOAD_AGAIN}")
    if repeated:
        raise CheckpointError(f"{file}: field {repeated[0]} is given more than once; keep one")
    if wild:
        raise CheckpointError(f"{file}: field {wild[0]} is not a finite number of 64 bits; correct it")
    return value


def fits_64_bits(number: int | float) -> bool:
    return -(2**63) <= number < 2**63 if isinstance(number, int) else math.isfinite(number)


def walk_numbers(value: Any, field: str = "", depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """All numbers of a JSON value with their field, such as `rope_scaling.factor` or `eos_token_id[1]`.

    Raises RecursionError if the value is nested deeper than MAX_JSON_DEPTH.
    """
    if depth > MAX_JSON_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk_numbers(item, f"{field}.{key}" if field else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk_numbers(item, f"{field}[{index}]", depth + 1)
    elif isinstance(value, int | float):
        yield field, value


def deepest_field(text: str) -> str:
    """The top-level field whose brackets nest deeper than MAX_JSON_DEPTH: the last string before they open."""
    depth, field = 0, ""
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_JSON_DEPTH:
            break
        if depth == 1 and token[0].startswith('"'):
            field = token[0]
    return field


def shortened(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message: the first `limit`, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
