"""Writes a folder atomically: it is complete, or it does not exist. Rank 0 writes; a single process does too.

Everything is written to a temporary folder beside the final one, synced to disk, then renamed; a folder that is
replaced keeps its content until then. What a killed process leaves of it is removed by the next that writes the same
folder; a lock shows whether its writer lives: the operating system releases it when its process ends, however it ends,
also on another host of a shared file system, where a process id would tell nothing. A tensor is written block by block,
so that the host never holds more than one block. File modes follow the user's umask.
"""

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from ligermodels.distributed import is_first, raise_on_all
from ligermodels.errors import CheckpointError
from ligermodels.weights.files import SAFETENSORS_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
UNFINISHED_FOLDER = ".tmp-ligermodels-"  # in the name of a temporary folder; a user's own folder has no such name
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h: for renameat2, which Python's os lacks
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that cannot exchange two names


class Entry(NamedTuple):
    """The header entry of a tensor in a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Blocks = Iterable[Tensor]  # consecutive rows of one tensor, on any device


def write_folder(
    folder: Path, write: Callable[[Path], None], tensors: Iterator[Blocks], sharded: bool,
    also: Callable[[Path], None] | None = None, replaced: Sequence[str] = (),
) -> None:  # fmt: skip
    """Makes `folder` atomically from the files that `write`, then `also`, put into the path they get.

    Every rank must call; rank 0 writes.
    replaced: see `refuse_in_use`.
    tensors: the iterator that `write` reads. If they are `sharded`, each step of it is a collective (a gather): the
    ranks that do not write advance it too, all ranks return when the folder is complete, and all raise if rank 0 fails.
    Raises CheckpointError if `folder` is in use or cannot be written; then nothing is left behind.
    """

    def write_files() -> None:
        with atomic_folder(folder, bool(replaced)) as temporary:
            write(temporary)
            if also is not None:
                also(temporary)

    error = failure(prepare_writing, folder, replaced) if is_first() else None
    (raise_on_all if sharded else raise_if_any)(error)
    write_on_first_rank(write_files, tensors, sharded)


def write_on_first_rank(write: Callable[[], None], tensors: Iterator[Any], sharded: bool) -> None:
    """Calls `write`, which takes what it writes from `tensors`, on rank 0. If they are `sharded`, all ranks take part
    in the gathers, and all raise if rank 0 fails."""
    error = failure(write) if is_first() else None
    deque(tensors, maxlen=0)  # takes part in the remaining gathers, and keeps nothing
    (raise_on_all if sharded else raise_if_any)(error)


def prepare_writing(folder: Path, replaced: Sequence[str]) -> None:
    remove_leftovers(folder)
    refuse_in_use(folder, replaced)


def raise_if_any(error: Exception | None) -> None:
    if error is not None:
        raise error


def failure(function: Callable[..., None], *arguments: Any) -> Exception | None:
    """Calls the function; returns the exception that it raises, if any."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def in_use(folder: Path) -> bool:
    """Whether the path exists and is not an empty folder."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def refuse_in_use(folder: Path, replaced: Sequence[str] = ()) -> None:
    """Raises CheckpointError if the path exists and is not an empty folder.

    replaced: patterns of the files of a folder that may be replaced, the first for one that it must have. A folder with
    any other file is still refused: replacing it would lose that file.
    """
    try:
        if not in_use(folder):
            return
        if not replaced:
            raise CheckpointError(
                f"{folder}: exists and is not an empty folder; export to another folder, or overwrite it"
            )
        if not any(folder.glob(replaced[0])):
            raise CheckpointError(
                f"{folder}: has no {replaced[0]}, so it is no export to overwrite; export to another folder"
            )
        known = {file for pattern in replaced for file in folder.glob(pattern)}
        others = sorted(path for path in folder.rglob("*") if path not in known and not is_folder(path))
    except OSError as error:
        raise write_error(folder, error) from error
    if others:
        raise CheckpointError(
            f"{others[0]}: is no file of an export, and would be lost; move it, or export to another folder"
        )


@contextmanager
def atomic_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Does for a folder what `atomic_path` does for a file: the temporary one exists."""
    with atomic_path(folder, replace) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def atomic_path(folder: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary path for a folder or file, renamed to `folder` at the end. After an error it is removed, with the
    parents that were created.

    replace: what is in use is replaced then. Raises CheckpointError if it cannot be written, or another process is
    writing it.
    """
    temporary = folder.with_name(f"{folder.name}{UNFINISHED_FOLDER}{socket.gethostname()}-{os.getpid()}")
    parents: list[Path] = []
    done = False
    try:
        parents += (parent for parent in folder.parents if not parent.exists())
        if parents:
            folder.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(folder):
            try:
                yield temporary
                commit(temporary, folder, replace)
                done = True
            finally:
                remove_path(temporary)
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        if not done:
            remove_empty_folders(parents)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lets one process at a time write a folder, and removes first what killed ones have left of it. On a file system
    without locks neither is done. Raises CheckpointError if another process is writing the folder."""
    file = writers_lock(folder)
    try:
        lock = lock_file(file)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{folder}: is being written by {error.strerror}; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        remove_path(file)
        yield
        return
    with lock:
        try:
            for leftover in unfinished_folders(folder):
                remove_path(leftover)
            yield
        finally:
            remove_path(file)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes have left of a folder that they were writing. Raises CheckpointError if it cannot.
    One that was killed at its end has left a whole folder, and its lock."""
    if not (writers_lock(folder).exists() or any(unfinished_folders(folder))):
        return
    try:
        with only_writer(folder):
            pass
    except OSError as error:
        raise write_error(folder, error) from error


def writers_lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def unfinished_folders(folder: Path) -> list[Path]:
    """The temporary folders of all processes that write this folder, or have been killed while they did."""
    return list(folder.parent.glob(f"{glob.escape(folder.name)}{UNFINISHED_FOLDER}*"))


def remove_path(path: Path) -> None:
    """Removes a folder, a file or a link, as far as possible. What a link leads to stays."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def commit(temporary: Path, folder: Path, replace: bool = False) -> None:
    """Syncs a finished folder to disk, then renames it to its final name. What it replaces gets the temporary one."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    if replace and in_use(folder):
        exchange(temporary, folder)
    else:
        temporary.rename(folder)
    sync(folder.parent)


def exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two folders, atomically where the file system can: network file systems may not."""
    paths = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other))
    if ctypes.CDLL(None, use_errno=True).renameat2(*paths, RENAME_EXCHANGE) == 0:
        return
    if ctypes.get_errno() not in NO_EXCHANGE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    aside = one.with_name(f"{one.name}-replaced")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def write_error(folder: Path, error: OSError, remedy: str = "or choose another folder") -> CheckpointError:
    """The error for a folder that could not be written. remedy: what the user can do instead of freeing disk space."""
    return CheckpointError(f"{folder}: not written: {error.strerror or error}; make room there, {remedy}")


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Removes the folders, innermost first, until one is not empty."""
    try:
        for folder in folders:
            folder.rmdir()
    except OSError:
        pass


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_safetensors(
    file: Path, entries: Iterable[Entry], tensors: Iterator[Blocks], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file: takes one tensor from `tensors` per entry.

    metadata: additional fields of the header's __metadata__.
    """
    entries = tuple(entries)
    with file.open("wb") as stream:
        stream.write(safetensors_header(entries, metadata)[0])
        for _, blocks in zip(entries, tensors, strict=False):
            for block in blocks:
                stream.write(block_bytes(block))


def safetensors_header(
    entries: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """What a file begins with, and where each tensor of these entries, in order, begins in bytes from its start."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # old readers require the format
    begins: dict[str, int] = {}
    end = 0
    for entry in entries:
        begins[entry.name], end = end, end + entry.nbytes
        offsets = [begins[entry.name], end]
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + begin for name, begin in begins.items()}


def block_bytes(block: Tensor) -> memoryview:
    """A block's bytes in row-major order; without a copy if it is contiguous on the host."""
    return block.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def replace_file(file: Path, content: bytes) -> None:
    """Writes a file atomically: whatever is killed when, it has its old content or the new one."""
    temporary = file.with_name(f".{file.name}")
    remove_path(temporary)
    with temporary.open("xb") as stream:  # a new file: a link of that name is not followed
        stream.write(content)
    temporary.replace(file)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def lock_file(file: Path) -> TextIO:
    """Locks a file, which is created, and writes into it which process holds it.

    Closing the returned file releases the lock. Its holder may remove the file before. Raises BlockingIOError, whose
    strerror names the holder, if another process holds the lock; another OSError if the file cannot be opened, or the
    file system has no locks.
    """
    while True:
        lock = os.fdopen(open_without_following(file), "r+", encoding="utf-8")
        try:
            take(lock)
            if is_file_of(lock, file):
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                lock.flush()
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()  # of a file that its last holder has removed: lock the new one


def take(lock: TextIO) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read(200).strip() or "another process"
        raise BlockingIOError(error.errno, holder) from None


def is_file_of(lock: TextIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(file))
    except FileNotFoundError:
        return False


def open_without_following(file: Path) -> int:
    """Opens or creates a file that is not a symbolic link: writing through one would change a file elsewhere."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
