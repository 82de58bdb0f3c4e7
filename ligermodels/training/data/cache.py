"""A disk cache of derived data: folders that are filled once, however many ranks and runs need them.

They are in $XDG_CACHE_HOME/ligermodels/data, by default ~/.cache/ligermodels/data. A folder's name is a hash of
everything that its content depends on. The cache only saves time: all of it may be deleted at any time.
"""

import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ligermodels import images, tokenizer
from ligermodels.distributed import local_rank, raise_on_all, waiting_group
from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.data.progress import print_status
from ligermodels.weights.writing import atomic_folder

FILL_TIMEOUT = timedelta(days=2)  # for another rank to fill the folders


def cached_folder(key: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """The folder of `key`, a JSON object. Every rank must call this; the first rank of each host fills a new folder.

    fill: writes the content to the path that it is given. If it raises an InputError, every rank raises it.
    """
    return cached_folders([(key, fill)])[0]


def cached_folders(requests: Sequence[tuple[dict[str, Any], Callable[[Path], None]]]) -> list[Path]:
    """`cached_folder` for several pairs of key and fill; ranks synchronise once for all of them."""
    folders = [cache_folder() / folder_name(key) for key, _ in requests]
    error = None
    if local_rank() == 0:
        try:
            for folder, (_, fill) in zip(folders, requests, strict=True):
                fill_once(folder, fill)
        except InputError as failure:
            error = failure
    with waiting_group(FILL_TIMEOUT) as group:
        raise_on_all(error, group)
    return folders


def folder_name(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key | {"code": code_hash()}, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ligermodels" / "data"


@functools.cache
def code_hash() -> str:
    """A hash of the modules that make data, so that folders written by another version of them are not used."""
    folders = [Path(__file__).parent, *(Path(path) for module in (images, tokenizer) for path in module.__path__)]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def fill_once(folder: Path, fill: Callable[[Path], None]) -> None:
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
            print_status(f"Waiting for another run that is preparing the same data: {file.with_suffix('')}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
