"""The folder of a run and its lock: one run at a time may use it. Must not know what the files in it hold."""

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

LOCK, CHECKPOINTS, MODEL, ADAPTER = "lock", "checkpoints", "model", "adapter"  # names in the folder
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run's folder. Every rank calls; rank 0 has the lock.

    The operating system releases the lock when the process ends, however it ends. The lock file stays, with the host
    and process that last held it, unless the run has written nothing else: then the folder is removed again.
    Raises InputError on all ranks where another run holds the folder or it cannot be written; later, where the disk is
    full.
    """
    held: list[TextIO] = []
    created = [path for path in (folder, *folder.parents) if not path.exists()]
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
                remove_empty_folders(created)
            file.close()


def acquire(folder: Path) -> TextIO:
    """The folder's lock file, open; closing it releases the lock."""
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
    """The folder of a run of `model`: runs/llama-8b for llama:8b; for the export of another run, that run's name."""
    path = Path(os.path.abspath(model.replace(":", "-")))
    return Path("runs") / (path.parent.name if path.name == MODEL else path.name)


def new_folder(wanted: Path | None, default: Path) -> Path:
    """The folder of a new run: `wanted`, else the first of default, default-2, default-3, … that does not exist.

    Every rank calls, and gets what rank 0 finds. Raises InputError on all ranks where `wanted` exists.
    """
    if wanted is not None:
        raise_on_all(failure(refuse_used, wanted) if is_first() else None)
        return wanted
    numbered = (default.with_name(f"{default.name}-{number}") for number in itertools.count(2))
    return from_first(next(folder for folder in itertools.chain([default], numbered) if not folder.exists()))


def refuse_used(folder: Path) -> None:
    if in_use(folder):
        raise InputError(f"{folder}: exists already; give another --output, or resume it with --resume {folder}")
