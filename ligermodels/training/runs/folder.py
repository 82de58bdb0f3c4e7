"""The folder of a run, which one run at a time may use. Knows of what lies in it the names, and its lock."""

import errno
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ligermodels.distributed import from_first, is_first, raise_on_all
from ligermodels.errors import InputError
from ligermodels.weights.writing import failure, in_use, remove_empty_folders, write_error

LOCK, CHECKPOINTS, MODEL, ADAPTER = "lock", "checkpoints", "model", "adapter"  # in it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a run's folder, made where there is none. Every rank calls; the lock is rank 0's.

    It ends with the process however that ends; the file stays, with the last holder's host and process in it, unless
    nothing else has been written by then: then the folder is as it was before.
    Raises InputError on all ranks where another run holds it, or the folder cannot be written; later, where it is full.
    """
    held: list[TextIO] = []
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    error = failure(lambda: held.append(acquire(folder))) if is_first() else None
    raise_on_all(error)
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise write_error(folder, error) from error
        raise
    finally:
        for file in held:
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                remove_empty_folders(made)
            file.close()


def acquire(folder: Path) -> TextIO:
    """The folder's lock, open; to close it gives the folder back."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise write_error(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        file.close()
        raise InputError(f"{folder}: in use by {holder}; wait for it, stop it, or choose another --output") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def default_folder(model: str) -> Path:
    """Where a run of a model goes: runs/ and its name, as llama-8b, that of its run where it is one's export."""
    path = Path(os.path.abspath(model.replace(":", "-")))
    return Path("runs") / (path.parent.name if path.name == MODEL else path.name)


def new_folder(wanted: Path | None, default: Path) -> Path:
    """The folder of a new run: `wanted`, or `default` or the first of default-2, default-3, … that does not exist.

    Every rank calls, and gets what rank 0 finds. Raises InputError on all ranks where `wanted` is in use.
    """
    if wanted is not None:
        error = failure(refuse_used, wanted) if is_first() else None
        raise_on_all(error)
        return wanted
    numbered = (default.with_name(f"{default.name}-{number}") for number in itertools.count(2))
    return from_first(next(folder for folder in itertools.chain([default], numbered) if not folder.exists()))


def refuse_used(folder: Path) -> None:
    if in_use(folder):
        raise InputError(f"{folder}: exists already; give another --output, or go on with it by --resume {folder}")
