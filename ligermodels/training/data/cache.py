"""Folders of derived data in the user's cache, each filled once, however many ranks and runs ask for it.

They are at $XDG_CACHE_HOME/ligermodels/data, by default ~/.cache/ligermodels/data, under a hash of all that their
content follows from. Nothing there is needed but to save time: all of it may be removed at any time.
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ligermodels import tokenizer
from ligermodels.distributed import local_rank, raise_on_all, waiting_group
from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.data.progress import say
from ligermodels.weights.writing import atomic_folder

LONGEST_WAIT = timedelta(days=2)  # for another rank to fill a folder


def cached(key: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """The folder of `key`, a JSON object. Every rank calls; where it is not there, the first of each host makes it.

    fill: writes into the path that it is given. An InputError of it is raised on every rank.
    """
    return all_cached([(key, fill)])[0]


def all_cached(wanted: Sequence[tuple[dict[str, Any], Callable[[Path], None]]]) -> list[Path]:
    """The folders of several keys, as `cached`: the ranks wait for each other once, not for each folder."""
    folders = [cache_folder() / name_of(key) for key, _ in wanted]
    error = None
    if local_rank() == 0:
        try:
            for folder, (_, fill) in zip(folders, wanted, strict=True):
                fill_once(folder, fill)
        except InputError as failed:
            error = failed
    with waiting_group(LONGEST_WAIT) as group:
        raise_on_all(error, group)
    return folders


def name_of(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key | {"code": code()}, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ligermodels" / "data"


@functools.cache
def code() -> str:
    """Of the modules that make data: what another version of them left is not taken."""
    folders = [Path(__file__).parent, Path(tokenizer.__file__).parent]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def fill_once(folder: Path, fill: Callable[[Path], None]) -> None:
    with alone(folder.with_suffix(".lock")):
        if not folder.exists():
            for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            try:
                with atomic_folder(folder) as temporary:
                    fill(temporary)
            except CheckpointError as error:
                raise InputError(f"{error}, by XDG_CACHE_HOME") from error


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Of all processes that come here one goes on; the next when it has left or died."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written to") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for another run, which makes what this one needs: {file.with_suffix('')}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
