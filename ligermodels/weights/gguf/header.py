"""Reads the header of a GGUF file: metadata, and the name, type, shape and place of each tensor.

A file may be damaged or hostile. Every number in it is checked against the bytes that the file has before anything is
allocated or skipped by it. The format, with all numbers little-endian:

    magic "GGUF", version uint32, number of tensors uint64, number of metadata entries uint64
    each metadata entry: key (string), type uint32, value
    each tensor: name (string), number of dimensions uint32, dimensions uint64 (innermost first), type uint32,
                 offset uint64 from the start of the data
    padding to a multiple of general.alignment; the tensors, each padded likewise

A string is its length in bytes (uint64) and UTF-8; an array is the type of its elements (uint32), their number (uint64)
and the elements.
"""

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.reading import DOWNLOAD_AGAIN, open_for_reading, refuse_text

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_GGUF_HEADER_BYTES = 400_000_000
MAX_STRINGS = 5_000_000  # in all arrays together; a vocabulary of 262,144 tokens has 780,000 with its merges
MAX_ENTRIES = 100_000  # of metadata; files have about 40
MAX_TENSORS = 200_000
GGUF_DIMENSIONS = 4
MAX_NAME_BYTES = 512
MAX_STRING_BYTES = 100_000_000
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9  # types of metadata
NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", FLOAT32: "<f4", BOOL: "u1", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a GGUF file.

    type: the number of its encoding, ggml's. block: elements that are encoded together. block_bytes: their bytes.
    shape: outermost dimension first. begin: its offset in bytes from the start of the file.
    """

    file: Path
    type: int
    block: int
    block_bytes: int
    shape: tuple[int, ...]
    begin: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block * self.block_bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block * self.block_bytes


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file, or of all files of a model that is split.

    file: the first. metadata: numbers, strings, lists of strings and numpy arrays of numbers, by key.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of a key, `default` if there is none. Raises CheckpointError if it is of another type."""
        return self.require(key, kind) if key in self.metadata else default

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a key. Raises CheckpointError if there is none, or if it is of another type."""
        if key not in self.metadata:
            raise CheckpointError(f"{self.file}: {key} is missing; convert it again with a newer converter")
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.file}: {key} is {type(value).__name__}, must be {kind.__name__}; convert it again"
            )
        return value


def as_read(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as `read_gguf_header` gives it: lists of numbers are arrays."""
    return {
        key: np.array(value) if isinstance(value, list) and value and not isinstance(value[0], str) else value
        for key, value in metadata.items()
    }


def import_gguf(file: Path | str) -> ModuleType:
    """The package `gguf`, llama.cpp's own. Raises InputError, which names the file, if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise InputError(f"{file}: GGUF files need the package gguf: pip install 'ligermodels[gguf]'") from None
    return gguf


def read_gguf_header(files: Sequence[Path]) -> GgufHeader:
    """The header of a model: of one file, or of all files of a split one, of which the first has the metadata. Raises
    CheckpointError, before anything is allocated for what a damaged header claims."""
    first, *others = (read_one_header(file) for file in files)
    tensors = dict(first.tensors)
    for other in others:
        for name in other.tensors.keys() & tensors.keys():
            raise CheckpointError(f"{other.file}: tensor {name} is in {tensors[name].file.name} too; {DOWNLOAD_AGAIN}")
        tensors |= other.tensors
    return GgufHeader(first.file, first.metadata, tensors)


def read_one_header(file: Path) -> GgufHeader:
    gguf = import_gguf(file)
    with open_for_reading(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        refuse_text(file, stream.read(64))
        stream.seek(0)
        reader = HeaderReader(file, stream, min(size, MAX_GGUF_HEADER_BYTES))
        tensor_count, entry_count = reader.counts()
        metadata = dict[str, Any]()
        for _ in range(entry_count):
            key = reader.string("a key", MAX_NAME_BYTES)
            if key in metadata:
                raise reader.error(f"metadata {key} is given twice")
            metadata[key] = reader.value(key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise reader.error(f"general.alignment is {alignment!r}, no power of two up to {MAX_ALIGNMENT}")
        described = reader.tensors(tensor_count)
        start = -(-reader.position // alignment) * alignment
    tensors = {
        name: place_tensor(file, name, *fields, start=start, alignment=alignment, known=gguf.GGML_QUANT_SIZES)
        for name, fields in described.items()
    }
    refuse_overlaps(file, tensors, size)
    return GgufHeader(file, metadata, tensors)


class HeaderReader:
    """Reads numbers, strings and arrays one after another, never beyond `limit` bytes of the file."""

    def __init__(self, file: Path, stream: BufferedReader, limit: int) -> None:
        self.file, self.stream, self.limit = file, stream, limit
        self.position, self.strings = 0, 0

    def error(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {fault}; {DOWNLOAD_AGAIN}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.limit - self.position:
            raise self.error(f"{what} needs {count} bytes, but the header has {self.limit - self.position} left")
        data = self.stream.read(count)
        if len(data) < count:
            raise self.error(f"truncated while it was read, within {what}")
        self.position += count
        return data

    def number(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "little")

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A number of things of which each takes `least_bytes` or more."""
        count = self.number(8, f"the number of {what}")
        left = self.limit - self.position
        if count > limit or count * least_bytes > left:
            raise self.error(f"claims {count} {what}, more than {min(limit, left // least_bytes)}")
        return count

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.number(8, what)
        if length > limit:
            raise self.error(f"{what} has {length} bytes, more than {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text: {error}") from None

    def counts(self) -> tuple[int, int]:
        """The start of the file: the numbers of tensors and of metadata entries."""
        magic = self.take(4, "the magic number")
        if magic != MAGIC:
            raise self.error(f"begins with {magic!r}, not {MAGIC!r}: it is no GGUF file")
        version = self.number(4, "the version")
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            fault = "is big-endian" if big_endian else f"has version {version}"
            raise CheckpointError(
                f"{self.file}: {fault}; little-endian GGUF of version {' or '.join(map(str, VERSIONS))} is read: "
                "convert it again"
            )
        tensor_count = self.count("tensors", MAX_TENSORS, 32)
        return tensor_count, self.count("metadata entries", MAX_ENTRIES, 13)

    def value(self, key: str) -> Any:
        kind = self.number(4, key)
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self.array(key)
        if kind not in NUMBERS:
            raise self.error(f"metadata {key} has the unknown type {kind}")
        (value,) = np.frombuffer(self.take(np.dtype(NUMBERS[kind]).itemsize, key), NUMBERS[kind])
        if kind == FLOAT32:
            return float(str(value))  # 1e-05, where its exact value is 9.999999747378752e-06
        return bool(value) if kind == BOOL else value.item()

    def array(self, key: str) -> Any:
        kind = self.number(4, key)
        if kind == STRING:
            count = self.count(f"strings in {key}", MAX_STRINGS - self.strings, 8)
            self.strings += count
            return [self.string(key, MAX_STRING_BYTES) for _ in range(count)]
        if kind not in NUMBERS:
            raise self.error(f"metadata {key} is an array of the type {kind}, which is not supported")
        dtype = np.dtype(NUMBERS[kind])
        count = self.count(f"numbers in {key}", MAX_STRINGS, dtype.itemsize)
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype)

    def tensors(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """(shape, type, offset) of each tensor by name."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self.string("the name of a tensor", MAX_NAME_BYTES)
            if name in found:
                raise self.error(f"tensor {name} is described twice")
            dimensions = self.number(4, name)
            if not 0 < dimensions <= GGUF_DIMENSIONS:
                raise self.error(f"tensor {name} has {dimensions} dimensions, not 1 to {GGUF_DIMENSIONS}")
            shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions, name))[::-1]
            found[name] = shape, self.number(4, name), self.number(8, name)
        return found


def place_tensor(
    file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, *,
    start: int, alignment: int, known: Mapping[int, tuple[int, int]],
) -> TensorInfo:  # fmt: skip
    """A tensor's place in the file. known: (block, block_bytes) by type. Raises CheckpointError."""
    if kind not in known:
        raise CheckpointError(f"{file}: tensor {name} has the type {kind}, which the installed gguf does not know")
    block, block_bytes = known[kind]
    if not all(shape) or shape[-1] % block:
        raise CheckpointError(
            f"{file}: tensor {name} has the shape {list(shape)}, which cannot be in blocks of {block}; {DOWNLOAD_AGAIN}"
        )
    if offset % alignment:
        raise CheckpointError(
            f"{file}: tensor {name} has the offset {offset}, no multiple of {alignment}; {DOWNLOAD_AGAIN}"
        )
    return TensorInfo(file, int(kind), block, block_bytes, shape, start + offset)


def refuse_overlaps(file: Path, tensors: Mapping[str, TensorInfo], size: int) -> None:
    """Raises CheckpointError if tensors overlap, or reach beyond the file's `size`."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].begin):
        if info.begin < position:
            raise CheckpointError(f"{file}: tensor {name} overlaps the previous one; {DOWNLOAD_AGAIN}")
        position = info.begin + info.nbytes
        if position > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {name} ends at byte {position} of {size}; {DOWNLOAD_AGAIN}"
            )
