"""Streams boxes of stored tensors into target tensors on any device, through a fixed ring of host buffers.

A pool of threads reads the files by position (preadv); each requested byte is read exactly once. If the target is on
the CPU, contiguous and of the stored dtype, the bytes are read directly into its memory; otherwise into a buffer. For a
GPU the buffers are pinned and copied on a separate CUDA stream, so that reading and copying overlap. Dtypes are
converted on the target's device. Files are not memory-mapped: copies from mapped memory to a GPU are slow, and if a
mapped file were truncated while it is read, a signal would end the process instead of an error.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor
from tqdm import tqdm

from ligermodels.errors import CheckpointError
from ligermodels.weights.gguf.tensors import GgufTensor
from ligermodels.weights.quantised import Scale
from ligermodels.weights.reading import DOWNLOAD_AGAIN
from ligermodels.weights.stored import FP4_DTYPE, Checkpoint, StoredTensor

BUFFER_BYTES = 16 * 2**20
THREADS = 8
BUFFERS = 12  # one per reading thread, and four more that are being copied meanwhile
BUFFER_ALIGNMENT = 16  # bytes; alignment of the tensors in a buffer, so that each can be viewed in its dtype


@dataclass(frozen=True)
class Transfer:
    """A box of the stored tensor `name`, and the target tensor of the same shape; their dtypes may differ.

    scale: of a quantised tensor; None for any other.
    """

    name: str
    stored: StoredTensor
    box: tuple[slice, ...]
    target: Tensor
    scale: Scale | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.bytes_of(self.target.numel())

    @property
    def aligned_nbytes(self) -> int:
        """Bytes in a buffer."""
        return -(-self.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def run_transfers(
    transfers: Iterable[Transfer], label: str, quiet: bool = False, *, check_finite: bool = False
) -> None:
    """Runs all transfers and returns when they are complete.

    label: of the progress bar, which a terminal shows after one second unless `quiet`. check_finite: whether targets,
    of floating point, must get finite values.
    Raises CheckpointError if a file cannot be read or is shorter than its header says, or for values that are not
    finite, with the tensor's name. Some targets may have been written by then.
    """
    ordered = sorted(transfers, key=lambda transfer: (transfer.stored.file, transfer.stored.begin))
    total = sum(transfer.nbytes for transfer in ordered)
    with (
        open_data_files({file for transfer in ordered for file in transfer.stored.files}) as files,
        tqdm(desc=label, total=total, unit="B", unit_scale=True, delay=1, disable=quiet or None) as progress,
    ):
        for device in {transfer.target.device for transfer in ordered}:
            sums: list[tuple[Transfer, Tensor]] | None = [] if check_finite else None
            for nbytes in run_transfers_to(device, [x for x in ordered if x.target.device == device], files, sums):
                progress.update(nbytes)
            if sums:
                refuse_any_not_finite(sums)


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The values of whole tensors, in host memory and in their stored dtype. Raises CheckpointError."""
    tensors = {name: torch.empty(of.shape, dtype=of.dtype, device="cpu") for name, of in stored.items()}
    boxes = {name: tuple(slice(0, size) for size in of.shape) for name, of in stored.items()}
    run_transfers((Transfer(name, stored[name], boxes[name], tensors[name]) for name in stored), "", quiet=True)
    return tensors


def run_transfers_to(
    device: torch.device, transfers: Iterable[Transfer], files: Mapping[Path, "DataFile"],
    sums: list[tuple[Transfer, Tensor]] | None,
) -> Iterator[int]:  # fmt: skip
    """Runs the transfers to one device; yields the number of bytes of each batch when it is done.

    sums: gets the sum of each part of a transfer, a scalar on its device, which nothing waits for.
    """
    batches = list(batch_transfers(part for transfer in transfers for part in split_transfer(transfer)))
    inference = torch.is_inference_mode_enabled()  # inference mode is thread-local

    def move(batch: list[Transfer]) -> int:
        with torch.inference_mode(inference), ring.buffer() as buffer:
            position = 0
            for transfer in batch:
                read_transfer(transfer, files, buffer[position : position + transfer.nbytes])
                position += transfer.aligned_nbytes
                if sums is not None:
                    sums.append((transfer, transfer.target.sum()))  # the fastest reduction that no NaN or inf survives
        return sum(transfer.nbytes for transfer in batch)

    with BufferRing(device, min(BUFFERS, len(batches))) as ring, ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(move, batches)


def split_transfer(transfer: Transfer) -> Iterator[Transfer]:
    """Splits a transfer into parts that fit into a buffer, along the outermost dimension if that is enough."""
    if transfer.nbytes <= BUFFER_BYTES:
        yield transfer
        return
    box, shape = transfer.box, transfer.target.shape
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    step = max(1, BUFFER_BYTES * shape[dim] // transfer.nbytes)
    for start in range(0, shape[dim], step):
        target = transfer.target[(slice(None),) * dim + (slice(start, start + step),)]
        begin = box[dim].start + start
        part = slice(begin, begin + target.shape[dim])
        yield from split_transfer(replace(transfer, box=(*box[:dim], part, *box[dim + 1 :]), target=target))


def batch_transfers(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Groups consecutive transfers that fit into one buffer."""
    batch: list[Transfer] = []
    filled = 0
    for transfer in transfers:
        if filled + transfer.aligned_nbytes > BUFFER_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(transfer)
        filled += transfer.aligned_nbytes
    yield batch


class BufferRing:
    """Buffers that are used in turn. Each is allocated when first used, so that pinning overlaps with reading. Buffers
    for a GPU are pinned and copied on a separate stream. torch's caching host allocator reuses their memory."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # it may still be using the targets' memory
        self.buffers: SimpleQueue[tuple[Tensor | None, Callable[[], None]]] = SimpleQueue()
        for _ in range(count):
            self.buffers.put((None, lambda: None))

    def __enter__(self) -> "BufferRing":
        return self

    def __exit__(self, *error: object) -> None:
        if self.stream:
            self.stream.synchronize()

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """The least recently used buffer, once copies from it have finished. Enqueue copies inside the context."""
        buffer, wait = self.buffers.get()
        try:
            wait()
            if buffer is None:
                buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                yield buffer
        finally:
            if self.stream:
                wait = self.stream.record_event(torch.cuda.Event(blocking=True)).synchronize
            self.buffers.put((buffer, wait))


def read_transfer(transfer: Transfer, files: Mapping[Path, "DataFile"], buffer: Tensor) -> None:
    """Reads one transfer: directly into the target's memory where possible, else through `buffer`, of its size."""
    target, dtype = transfer.target, transfer.stored.dtype
    if isinstance(transfer.stored, GgufTensor):
        target.copy_(transfer.stored.read(partial(read_run, files, transfer.name), transfer.box))
        return
    file = files[transfer.stored.file]
    runs = contiguous_runs(transfer.stored, transfer.box)
    if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        file.read(transfer.name, runs, target.as_strided((target.numel(),), (1,)).view(torch.uint8))
        return
    file.read(transfer.name, runs, buffer)
    if dtype == FP4_DTYPE:
        staged = buffer.view(*target.shape[:-1], target.shape[-1] // 2)
    else:
        staged = buffer.view(dtype).view(target.shape)
    if target.dtype != dtype:
        staged = staged.to(target.device, non_blocking=True)  # convert on the target's device
    if transfer.scale is not None:
        staged = transfer.scale.decode(staged, transfer.box)
    target.copy_(staged, non_blocking=True)


def refuse_any_not_finite(sums: Sequence[tuple[Transfer, Tensor]]) -> None:
    """Raises CheckpointError, which names the tensor, if a target has a value that is not finite. The host looks at the
    device once, and at a target only where its sum is not finite, which that of large finite values may be too."""
    finite = torch.stack([value.double() for _, value in sums]).isfinite().tolist()
    for transfer in (transfer for (transfer, _), is_finite in zip(sums, finite, strict=True) if not is_finite):
        largest = transfer.target.abs().amax()
        refuse_not_finite(transfer.stored.file, transfer.name, largest, transfer.target.dtype)


def refuse_not_finite(file: Path, name: str, largest: Tensor | float, dtype: torch.dtype) -> None:
    """Raises CheckpointError if the largest absolute value of a tensor is NaN, or beyond a dtype."""
    if not largest <= torch.finfo(dtype).max:
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{file}: tensor {name} has values that are not finite in {kind}; {DOWNLOAD_AGAIN}")


def contiguous_runs(stored: StoredTensor, box: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes, within the file, of each contiguous run of a box, in the box's order."""
    shape, box = (1, *stored.shape), (slice(0, 1), *box)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # in elements
    # The box covers all dimensions after this one completely.
    last = max((dim for dim, side in enumerate(box) if (side.start, side.stop) != (0, shape[dim])), default=0)
    begin, length = box[last].start * strides[last], (box[last].stop - box[last].start) * strides[last]
    for index in itertools.product(*(range(side.start, side.stop) for side in box[:last])):
        first = begin + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield stored.begin + stored.bytes_of(first), stored.bytes_of(length)


def read_run(files: Mapping[Path, "DataFile"], name: str, path: Path, offset: int, view: memoryview) -> None:
    files[path].read_run(name, offset, view)


class DataFile:
    """An open file of tensors that is read by position, by any number of threads at a time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def read(self, name: str, runs: Iterable[tuple[int, int]], memory: Tensor) -> None:
        """Reads runs, given as (offset, length), one after another into `memory` (uint8, on the host).

        name: the tensor that the runs belong to, for errors.
        """
        view, position = memory.numpy().data, 0
        for offset, length in runs:
            self.read_run(name, offset, view[position : position + length])
            position += length

    def read_run(self, name: str, offset: int, view: memoryview) -> None:
        """Fills `view` from `offset` of the file. Raises CheckpointError."""
        while view:
            try:
                count = os.preadv(self.descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: truncated while it was read, within tensor {name}; {DOWNLOAD_AGAIN}"
                )
            view, offset = view[count:], offset + count


@contextmanager
def open_data_files(paths: Iterable[Path]) -> Iterator[dict[Path, DataFile]]:
    """Opens the files; closes them when the context ends."""
    with ExitStack() as stack:
        yield {path: DataFile(path, stack.enter_context(path.open("rb", buffering=0)).fileno()) for path in paths}


def bit_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes. Compares one buffer of each at a time."""
    a, b = checkpoint.tensors[first], checkpoint.tensors[second]
    if checkpoint.converted:
        return torch.equal(*read_tensors({first: a, second: b}).values())
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    size = math.prod(a.shape) * a.dtype.itemsize
    with open_data_files({a.file, b.file}) as files:
        for start in range(0, size, BUFFER_BYTES):
            length = min(BUFFER_BYTES, size - start)
            blocks = torch.empty(2, length, dtype=torch.uint8, device="cpu")
            for name, stored, block in zip((first, second), (a, b), blocks, strict=True):
                files[stored.file].read(name, [(stored.begin + start, length)], block)
            if not torch.equal(*blocks):
                return False
    return True
