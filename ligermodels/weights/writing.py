"""Files into a new folder that is complete or is not there, by rank 0 of several or by a process alone.

Everything is written beside the final name, synced, then renamed. A tensor is written block by block, so that the host
never holds more of it than a block. Modes are those that the user's umask gives any new file. Knows files and blocks of
tensors; no model, no rule.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.distributed import is_first, raise_on_all
from ligermodels.errors import CheckpointError
from ligermodels.weights.files import SAFETENSORS_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a safetensors file, as its header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Blocks = Iterable[Tensor]  # a tensor's rows, some at a time, on any device


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    tensors: Iterator[Blocks],
    sharded: bool,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Makes `folder` of what `write`, then `also`, writes into the path it is given; every rank calls.

    tensors: what `write` reads. Where they are `sharded`, to advance them gathers: then the ranks that do not write
    advance them all the same, all return when the folder is there, and all raise where rank 0 could not write it.
    Raises CheckpointError where `folder` is in use or cannot be written; then nothing is left behind.
    """
    writes = is_first()
    settle = raise_on_all if sharded else raise_if_any
    settle(failure(refuse_in_use, folder) if writes else None)
    error = failure(write_atomically, folder, [write] if also is None else [write, also]) if writes else None
    deque(tensors, maxlen=0)  # what is left of gathering; nothing is held on to
    settle(error)


def raise_if_any(error: Exception | None) -> None:
    if error is not None:
        raise error


def failure(function: Callable[..., None], *arguments: Any) -> Exception | None:
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def in_use(folder: Path) -> bool:
    """Whether there is anything but an empty folder."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def refuse_in_use(folder: Path) -> None:
    try:
        used = in_use(folder)
    except OSError as error:
        raise write_error(folder, error) from error
    if used:
        raise CheckpointError(f"{folder}: exists and is not an empty folder; export to another, or remove it")


def write_atomically(folder: Path, writers: Iterable[Callable[[Path], None]]) -> None:
    with atomic_folder(folder) as temporary:
        for write in writers:
            write(temporary)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` if all went well; else it is removed, as are parents made for it."""
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    parents: list[Path] = []
    done = False
    try:
        parents += (parent for parent in folder.parents if not parent.exists())
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        commit(temporary, folder)
        done = True
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        if not done:
            shutil.rmtree(temporary, ignore_errors=True)
            remove_empty_folders(parents)


def commit(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its final name, once all of it is on the disk."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    temporary.rename(folder)
    sync(folder.parent)


def write_error(folder: Path, error: OSError, remedy: str = "or choose another folder") -> CheckpointError:
    """remedy: what else helps, but room."""
    return CheckpointError(f"{folder}: not written: {error.strerror or error}; make room there, {remedy}")


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Innermost first, as far as nobody else has put anything there."""
    try:
        for folder in folders:
            folder.rmdir()
    except OSError:
        pass


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_safetensors(
    file: Path, entries: Iterable[Entry], tensors: Iterator[Blocks], metadata: Mapping[str, str] | None = None
) -> None:
    """One safetensors file of as many of the tensors as there are entries. metadata: more of it for the header."""
    entries = tuple(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # older readers refuse without
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, blocks in zip(entries, tensors, strict=False):
            for block in blocks:
                stream.write(block_bytes(block))


def block_bytes(block: Tensor) -> memoryview:
    """A block's elements in row order; of one that lies so on the host, its own memory."""
    return block.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
