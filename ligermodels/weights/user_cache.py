"""The user's cache, $XDG_CACHE_HOME/ligermodels or ~/.cache/ligermodels: folders that are filled once.

It only saves time: all of it may be deleted at any time.
"""

import fcntl
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ligermodels.distributed import is_first
from ligermodels.errors import CheckpointError, InputError, print_to_stderr
from ligermodels.weights.writing import atomic_folder


def user_cache(kind: str) -> Path:
    """The folder of the cache for one kind of content."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ligermodels" / kind


@functools.cache
def code_hash(*folders: Path) -> str:
    """A hash of the modules in folders, on which the content of a folder of the cache depends."""
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def fill_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder of the cache, if it does not exist, by a function that writes its content to the path it gets."""
    with exclusive_lock(folder.with_suffix(".lock")):
        if not folder.exists():
            try:
                with atomic_folder(folder) as temporary:
                    fill(temporary)
            except CheckpointError as error:
                raise InputError(f"{error}; XDG_CACHE_HOME sets the folder of the cache") from error


@contextmanager
def exclusive_lock(file: Path) -> Iterator[None]:
    """Lets one process at a time into the context; the lock is released when the process leaves it or dies."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; set XDG_CACHE_HOME to a writable folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_first():
                print_to_stderr(f"Waiting for another run that is preparing the same data: {file.with_suffix('')}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
