"""Locks of files, held by one process at a time.

The operating system releases a lock when its process ends, however it ends, also on another host of a shared file
system. A process id would tell neither.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO


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
