"""The folder of a run, which one run at a time may use. Knows no more of what lies in it than its lock."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from torch import distributed

from ligermodels.errors import InputError
from ligermodels.weights.writing import agree, failure, not_written

LOCK = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a run's folder, made where there is none. Every rank calls; the lock is rank 0's.

    It ends with the process however that ends; the file stays, with the last holder's host and process in it.
    Raises InputError on all ranks where another run holds it, or the folder cannot be written.
    """
    held: list[TextIO] = []
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    agree(failure(lambda: held.append(acquire(folder))) if first else None, distributed.is_initialized())
    try:
        yield
    finally:
        for file in held:
            file.close()


def acquire(folder: Path) -> TextIO:
    """The folder's lock, open; to close it gives the folder back."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise not_written(folder, error) from error
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
