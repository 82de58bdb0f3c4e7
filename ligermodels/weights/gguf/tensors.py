"""The tensors of a GGUF file under the Hub's names, decoded while they are read.

What a converter has changed is undone on the way: queries and keys with interleaved rotary pairs, norms with 1 added,
stacked experts. A tensor in fp32, fp16 or bf16 that needs none of this is read as one of safetensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ligermodels.errors import CheckpointError
from ligermodels.weights.gguf.fields import LARGEST_SIZE, LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS
from ligermodels.weights.gguf.header import GgufHeader, TensorInfo
from ligermodels.weights.gguf.names import MISTRAL, MIXTRAL, STORED, Stored
from ligermodels.weights.mapping import name_translator
from ligermodels.weights.stored import Checkpoint, Shape, StoredTensor

DECODED_ELEMENTS = 2**17  # at a time
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class ReadRun(Protocol):
    """Fills a buffer from an offset of a file."""

    def __call__(self, file: Path, offset: int, view: memoryview) -> None: ...


@dataclass(frozen=True, kw_only=True)
class GgufTensor(StoredTensor):
    """A tensor whose rows are encoded or in another order; the values are decoded to fp32.

    sources: its parts in the files, whose rows follow each other in the order of the files.
    rows, order: the rows as stored, in shape `rows` with its dimensions in `order`, are the Hub's rows in their order.
    offset: is subtracted from the values.
    """

    sources: tuple[TensorInfo, ...]
    rows: Shape
    order: tuple[int, ...]
    offset: float = 0.0

    def bytes_of(self, elements: int) -> int:
        """The size of so many decoded elements: what limits how many are read at once."""
        return 4 * elements

    @property
    def files(self) -> set[Path]:
        return {source.file for source in self.sources}

    def read(self, read_run: ReadRun, box: tuple[slice, ...]) -> Tensor:
        """The values of a box of the tensor, fp32, on the host."""
        columns = self.sources[0].shape[-1]
        split = next(dim for dim in range(len(self.shape) + 1) if math.prod(self.shape[dim:]) == columns)
        wanted, inner = flat_indices(self.shape[:split], box[:split]), flat_indices(self.shape[split:], box[split:])
        values = np.empty((len(wanted), columns), np.float32)
        stored = self.stored_rows(wanted)
        source_rows = [math.prod(source.shape[:-1]) for source in self.sources]
        part, within = np.divmod(stored, source_rows[0])
        for number, source in enumerate(self.sources):
            chosen = part == number
            if chosen.any():
                values[chosen] = read_rows(source, within[chosen], read_run)
        if len(inner) < columns:
            values = values[:, inner]
        if self.offset:
            values -= np.float32(self.offset)
        return torch.from_numpy(values).view([side.stop - side.start for side in box])

    def stored_rows(self, rows: np.ndarray) -> np.ndarray:
        """The indices of the Hub's rows among the stored ones."""
        if self.order == tuple(sorted(self.order)):
            return rows
        permuted = np.unravel_index(rows, [self.rows[dim] for dim in self.order])
        return np.ravel_multi_index([permuted[place] for place in np.argsort(self.order)], self.rows)


def flat_indices(shape: Shape, box: tuple[slice, ...]) -> np.ndarray:
    """The indices of a box among all elements of a shape, in row-major order."""
    indices = np.zeros(1, np.int64)
    for size, side in zip(shape, box, strict=True):
        indices = (indices[:, None] * size + np.arange(side.start, side.stop)).ravel()
    return indices


def read_rows(source: TensorInfo, rows: np.ndarray, read_run: ReadRun) -> np.ndarray:
    """The decoded values of some rows, fp32. What lies between the first and the last is read too."""
    first, last = int(rows.min()), int(rows.max())
    data = np.empty((last - first + 1, source.row_bytes), np.uint8)
    read_run(source.file, source.begin + first * source.row_bytes, data.reshape(-1).data)
    values = decode(data, source)
    return values if len(values) == len(rows) and (np.diff(rows) == 1).all() else values[rows - first]


def decode(data: np.ndarray, source: TensorInfo) -> np.ndarray:
    """Rows of bytes -> their values, fp32 [rows, columns]. Blocks are decoded in groups that stay in a processor's
    cache, however long the rows are."""
    import gguf

    kind = gguf.GGMLQuantizationType(source.type)
    blocks = data.reshape(-1, source.block_bytes)
    values = np.empty((len(blocks), source.block), np.float32)
    for start in range(0, len(blocks), step := max(1, DECODED_ELEMENTS // source.block)):
        group = blocks[start : start + step]
        values[start : start + step] = gguf.quants.dequantize(group.reshape(1, -1), kind).reshape(-1, source.block)
    return values.reshape(len(data), -1)


def open_gguf(header: GgufHeader) -> Checkpoint:
    """The tensors of a GGUF file under the Hub's names. Raises CheckpointError."""
    stored = stored_as(header)
    tensors: dict[str, StoredTensor] = {}
    for name, info in header.tensors.items():
        if not can_decode(info.type):
            raise CheckpointError(f"{info.file}: tensor {name} has the type {info.type}, which gguf cannot decode")
        for hub, tensor in tensors_on_the_hub(header, stored, name, info):
            if hub in tensors:
                raise CheckpointError(f"{info.file}: {name} and another tensor stand for {hub}; convert it again")
            tensors[hub] = tensor
    return Checkpoint(header.file, tensors, converted=True)


def stored_as(header: GgufHeader) -> Stored:
    """How a file stores its family. Raises CheckpointError."""
    kind = header.get("general.type", str, "model")
    if kind != "model":
        raise CheckpointError(f"{header.file}: contains a GGUF of type {kind!r}, no language model; name another file")
    architecture = header.require("general.architecture", str)
    if architecture not in STORED:
        raise CheckpointError(
            f"{header.file}: general.architecture {architecture!r} is not supported as GGUF; supported: "
            f"{', '.join(STORED)}; load the original checkpoint"
        )
    if architecture == "llama" and header.get("llama.expert_count", int, 0):
        return MIXTRAL
    if architecture == "llama" and header.get("llama.attention.sliding_window", int, 0):
        return MISTRAL
    return STORED[architecture]


@cache
def can_decode(kind: int) -> bool:
    import gguf

    encoding = gguf.GGMLQuantizationType(kind)
    _, block_bytes = gguf.GGML_QUANT_SIZES[encoding]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), encoding)
    except NotImplementedError:
        return False
    return True


def tensors_on_the_hub(
    header: GgufHeader, stored: Stored, name: str, info: TensorInfo
) -> Iterator[tuple[str, StoredTensor]]:
    """What a tensor of the file is on the Hub; under its own name if it is not known."""
    if name in (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS):
        return  # config.json has the scaling in place of them
    for (gate, up), hub in stored.alternating.items():
        if name_translator(up, name):
            return  # read with its gate
        if translate := name_translator(gate, name):
            yield translate(hub), alternating(header, info, translate(up))
            return
    for theirs, hub in stored.names.items():
        if translate := name_translator(theirs, name):
            if hub.count("{}") == theirs.count("{}"):
                yield translate(hub), tensor_on_the_hub(header, stored, translate(hub), info)
            else:
                yield from ((translate(hub, number), part) for number, part in enumerate(stacked_tensors(info)))
            return
    yield name, one_tensor(info)


def tensor_on_the_hub(header: GgufHeader, stored: Stored, hub: str, info: TensorInfo) -> StoredTensor:
    if stored.norm_offset and hub.endswith("norm.weight"):
        return in_order(info, stored.norm_offset)
    if stored.interleaved and ".self_attn.q_proj." in hub:
        return deinterleaved(info, head_count(header, "head_count"))
    if stored.interleaved and ".self_attn.k_proj." in hub:
        return deinterleaved(info, head_count(header, "head_count_kv"))
    return one_tensor(info)


def one_tensor(info: TensorInfo) -> StoredTensor:
    import gguf

    plain = PLAIN.get(gguf.GGMLQuantizationType(info.type).name)
    if plain is not None:
        return StoredTensor(info.file, plain, info.shape, info.begin)
    return in_order(info)


def in_order(info: TensorInfo, offset: float = 0.0) -> StoredTensor:
    return encoded(info.shape, (info,), (math.prod(info.shape[:-1]),), (0,), offset)


def stacked_tensors(info: TensorInfo) -> Iterator[StoredTensor]:
    """The tensors along the first dimension, one for each expert."""
    size = info.nbytes // info.shape[0]
    return (
        one_tensor(replace(info, shape=info.shape[1:], begin=info.begin + number * size))
        for number in range(info.shape[0])
    )


def deinterleaved(info: TensorInfo, heads: int) -> StoredTensor:
    """Queries or keys with the two halves of each head's pairs apart, as on the Hub, from rows that alternate."""
    rows = one_a_row(info) if len(info.shape) == 1 else info
    pairs, rest = divmod(info.shape[0], 2 * heads)
    if rest:
        raise CheckpointError(
            f"{info.file}: queries or keys have {info.shape[0]} rows, not an even number for each of {heads} heads; "
            "convert it again"
        )
    return encoded(info.shape, (rows,), (heads, pairs, 2), (0, 2, 1))


def alternating(header: GgufHeader, gate: TensorInfo, name_of_up: str) -> StoredTensor:
    """Stacked experts whose rows are gate 0, up 0, gate 1, ... from two stacks [experts, rows, ...]."""
    up = header.tensors.get(name_of_up)
    if up is None or up.shape != gate.shape or len(gate.shape) < 2:
        raise CheckpointError(f"{gate.file}: {name_of_up} is missing or not of its gate's shape; convert it again")
    experts, rows, *columns = gate.shape
    sources = (gate, up) if columns else (one_a_row(gate), one_a_row(up))
    return encoded((experts, 2 * rows, *columns), sources, (2, experts, rows), (1, 2, 0))


def one_a_row(info: TensorInfo) -> TensorInfo:
    """A tensor of single elements, one a row. Raises CheckpointError if it is in blocks."""
    if info.block != 1:
        raise CheckpointError(f"{info.file}: a bias is in blocks, which is not supported; convert it again")
    return replace(info, shape=(*info.shape, 1))


def encoded(
    shape: Shape, sources: tuple[TensorInfo, ...], rows: Shape, order: tuple[int, ...], offset: float = 0.0
) -> GgufTensor:
    first = sources[0]
    return GgufTensor(
        first.file, torch.float32, shape, first.begin, sources=sources, rows=rows, order=order, offset=offset
    )


def head_count(header: GgufHeader, key: str) -> int:
    """The number of query heads, or of key-value heads, which is the same if the file does not say it."""
    prefix = f"{header.require('general.architecture', str)}.attention."
    queries = header.require(f"{prefix}head_count", int)
    count = queries if key == "head_count" else header.get(f"{prefix}{key}", int, queries)
    if not 0 < count <= LARGEST_SIZE:
        raise CheckpointError(f"{header.file}: {prefix}{key} is {count}, which it cannot be; convert it again")
    return count
