"""Boxes of stored tensors straight into tensors, wherever these are; the host holds a ring of buffers and no more.

Threads read by position, each byte that is asked for once and no other: into the tensor's own memory where the file's
bytes are its bytes, else into a buffer. On the way to a GPU buffers are pinned, and copied from on a stream of their
own while others are read into; dtypes are converted where the tensor is. Nothing is mapped: copies from a map to a GPU
are slow, and a file that somebody cuts short would end the process by a signal instead of an error.
Knows stored tensors and tensors; no model, no rule.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor
from tqdm import tqdm

from ligermodels.errors import CheckpointError
from ligermodels.weights.files import DOWNLOAD_AGAIN, Checkpoint, StoredTensor

BUFFER_BYTES = 16 * 2**20
THREADS = 8
BUFFERS = 12  # one to read into for each thread, and those that are copied from meanwhile
BUFFER_ALIGNMENT = 16  # bytes, of what shares a buffer, so that each can be viewed in its dtype


@dataclass(frozen=True)
class Transfer:
    """A box of the stored tensor `name`, and the tensor of the box's shape that takes it, in a dtype of its own."""

    name: str
    stored: StoredTensor
    box: tuple[slice, ...]
    target: Tensor

    @property
    def nbytes(self) -> int:
        """As stored."""
        return self.target.numel() * self.stored.dtype.itemsize

    @property
    def room(self) -> int:
        """The bytes it takes of a buffer."""
        return -(-self.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def run_transfers(transfers: Iterable[Transfer], label: str, quiet: bool = False) -> None:
    """Carries out all transfers; when it returns, everything is in place.

    label: of the progress bar that a terminal shows after a second, unless `quiet`.
    Raises CheckpointError where a file cannot be read or has become shorter than its header said; some targets are
    written then.
    """
    ordered = sorted(transfers, key=lambda transfer: (transfer.stored.file, transfer.stored.begin))
    total = sum(transfer.nbytes for transfer in ordered)
    with (
        open_data_files({transfer.stored.file for transfer in ordered}) as files,
        tqdm(desc=label, total=total, unit="B", unit_scale=True, delay=1, disable=quiet or None) as progress,
    ):
        for device in {transfer.target.device for transfer in ordered}:
            for nbytes in run_transfers_to(device, [x for x in ordered if x.target.device == device], files):
                progress.update(nbytes)


def run_transfers_to(
    device: torch.device, transfers: Iterable[Transfer], files: Mapping[Path, "DataFile"]
) -> Iterator[int]:
    """Carries out the transfers to one device; yields the number of bytes of each batch that is done."""
    batches = list(batch_transfers(part for transfer in transfers for part in split_transfer(transfer)))
    inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own

    def move(batch: list[Transfer]) -> int:
        with torch.inference_mode(inference), ring.buffer() as buffer:
            position = 0
            for transfer in batch:
                read_transfer(transfer, files[transfer.stored.file], buffer[position : position + transfer.nbytes])
                position += transfer.room
        return sum(transfer.nbytes for transfer in batch)

    with Ring(device, min(BUFFERS, len(batches))) as ring, ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(move, batches)


def split_transfer(transfer: Transfer) -> Iterator[Transfer]:
    """Parts of it that fit a buffer, along the outermost dimension where that does."""
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
    """Runs of transfers that share a buffer."""
    batch: list[Transfer] = []
    filled = 0
    for transfer in transfers:
        if filled + transfer.room > BUFFER_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(transfer)
        filled += transfer.room
    yield batch


class Ring:
    """Buffers that are used in turn, each made when its turn first comes: pinning takes time, in which others fill.

    Those for a GPU are pinned, and what is copied from them has its own stream; torch keeps their memory for later use.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # may still be busy with the targets' memory
        self.buffers: SimpleQueue[tuple[Tensor | None, Callable[[], None]]] = SimpleQueue()
        for _ in range(count):
            self.buffers.put((None, lambda: None))

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *error: object) -> None:
        if self.stream:
            self.stream.synchronize()

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """The one that has rested longest, once nothing is copied from it any more; copies are to be queued within."""
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


def read_transfer(transfer: Transfer, file: "DataFile", buffer: Tensor) -> None:
    """Reads one transfer, through a buffer of its size unless the target's memory takes the bytes as they are."""
    target, dtype = transfer.target, transfer.stored.dtype
    places = contiguous_runs(transfer.stored, transfer.box)
    if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        file.read(transfer.name, places, target.as_strided((target.numel(),), (1,)).view(torch.uint8))
        return
    file.read(transfer.name, places, buffer)
    staged = buffer.view(dtype).view(target.shape)
    if target.dtype != dtype:
        staged = staged.to(target.device, non_blocking=True)  # so that it is converted there
    target.copy_(staged, non_blocking=True)


def contiguous_runs(stored: StoredTensor, box: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
    """Where a box lies in its file's data: offset and length, in bytes, of each contiguous run, in the box's order."""
    shape, box = (1, *stored.shape), (slice(0, 1), *box)
    strides = [math.prod(shape[dim + 1 :]) * stored.dtype.itemsize for dim in range(len(shape))]
    # Beyond this dimension the box has everything.
    last = max((dim for dim, side in enumerate(box) if (side.start, side.stop) != (0, shape[dim])), default=0)
    begin, length = stored.begin + box[last].start * strides[last], (box[last].stop - box[last].start) * strides[last]
    for index in itertools.product(*(range(side.start, side.stop) for side in box[:last])):
        yield begin + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


class DataFile:
    """An open safetensors file, whose data is read by position: any number of threads may."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.data = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")

    def read(self, name: str, places: Iterable[tuple[int, int]], memory: Tensor) -> None:
        """Fills bytes in host memory with those at the given offsets and lengths, which belong to the tensor `name`."""
        view, position = memory.numpy().data, 0
        for offset, length in places:
            self.read_run(name, self.data + offset, view[position : position + length])
            position += length

    def read_run(self, name: str, offset: int, view: memoryview) -> None:
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
    with ExitStack() as stack:
        yield {path: DataFile(path, stack.enter_context(path.open("rb", buffering=0)).fileno()) for path in paths}


def bit_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors are stored with the same dtype, shape and bytes; compares a buffer of each at a time."""
    a, b = checkpoint.tensors[first], checkpoint.tensors[second]
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
