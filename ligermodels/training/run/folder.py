"""The folder of a run, its lock, by which one run at a time uses it, and run.json, for those who watch.

run.json says whether a run still trains, how it ended, its warnings, and the command that resumes it. A killed run
cannot write: its file says "running" while nobody holds the lock.
"""

import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from ligermodels.distributed import from_first, is_first, raise_on_all
from ligermodels.errors import InputError, first_line
from ligermodels.hub.names import ADAPTER, MODEL, SETTINGS_FILE
from ligermodels.weights.gguf.names import is_gguf
from ligermodels.weights.writing import (
    atomic_folder,
    failure,
    in_use,
    lock_file,
    remove_empty_folders,
    remove_leftovers,
    remove_path,
    replace_file,
    write_error,
)

LOCK, CHECKPOINTS = "lock", "checkpoints"  # further names in the folder
# A run writes these before it loads weights or takes a step: a folder that has nothing else holds no work yet.
FIRST_FILES = {LOCK, f".{SETTINGS_FILE}", SETTINGS_FILE}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
STATUS_FILE = "run.json"
MAX_WARNINGS = 100
State = Literal["running", "finished", "stopped", "failed"]


@contextmanager
def locked(folder: Path, write_first: Callable[[Path], None] | None = None) -> Iterator[None]:
    """Holds the lock of a run's folder. Every rank calls; rank 0 has the lock.

    write_first: writes what `--resume` reads into the folder of a new run. A folder that is created has it from its
    first moment; None for a run that is resumed.

    The operating system releases the lock when the process ends, however it ends. The lock file stays, with the host
    and process that last held it, unless a new run fails before it takes a step: then its folder is removed again.
    Raises InputError on all ranks where another run holds the folder or it cannot be written; later, where the disk is
    full or a path in the folder cannot be used.
    """
    held: list[TextIO] = []
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    new = bool(created) or not in_use(folder)
    error = failure(lambda: held.append(acquire(folder, write_first))) if is_first() else None
    raise_on_all(error)
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise write_error(folder, error) from error
        if error.filename and Path(error.filename).is_relative_to(folder):
            raise InputError(f"{error.filename}: cannot be used: {error.strerror}; remove it, or rename it") from error
        raise
    finally:
        for file in held:
            with file:
                if new and has_first_files_alone(folder):
                    for path in folder.iterdir():
                        remove_path(path)
                    remove_empty_folders(created)


def acquire(folder: Path, write_first: Callable[[Path], None] | None) -> TextIO:
    """The folder's lock file, open; closing it releases the lock. Removes what killed runs have left unfinished."""
    try:
        existed = folder.exists()
        if not existed:
            with atomic_folder(folder) as temporary:
                (temporary / LOCK).touch()
                if write_first is not None:
                    write_first(temporary)
        lock = lock_file(folder / LOCK)
        if existed and write_first is not None:
            write_first(folder)
    except BlockingIOError as error:
        raise InputError(
            f"{folder}: in use by {error.strerror}; wait for it, stop it, or choose another --output"
        ) from error
    except OSError as error:
        raise write_error(folder, error) from error
    for written in (folder, folder / MODEL, folder / ADAPTER):
        remove_leftovers(written)
    return lock


def has_first_files_alone(folder: Path) -> bool:
    """Whether the folder has a run's lock, and no file that a run writes once it has loaded its weights."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return LOCK in names and names <= FIRST_FILES


def default_folder(model: str) -> Path:
    """The folder of a run of `model`: runs/llama-8b for llama:8b, runs/x for x.gguf; for another run's export, that
    run's name."""
    path = Path(os.path.abspath(model.replace(":", "-")))
    if path.name == MODEL:
        return Path("runs") / path.parent.name
    return Path("runs") / (path.stem if is_gguf(path) else path.name)


def new_folder(wanted: Path | None, default: Path) -> Path:
    """The folder of a new run: `wanted`, else the first of default, default-2, default-3, … that does not exist.

    Every rank calls, and gets what rank 0 finds. Raises InputError on all ranks where `wanted` exists, unless it was
    left by a run that ended before it had loaded its weights.
    """
    if wanted is not None:
        raise_on_all(failure(refuse_used, wanted) if is_first() else None)
        return wanted
    numbered = (default.with_name(f"{default.name}-{number}") for number in itertools.count(2))
    return from_first(next(folder for folder in itertools.chain([default], numbered) if not folder.exists()))


def refuse_used(folder: Path) -> None:
    try:
        used = in_use(folder) and not has_first_files_alone(folder)
    except OSError as error:
        raise write_error(folder, error) from error
    if used:
        raise InputError(f"{folder}: exists already; give another --output, or resume it with --resume {folder}")


class RunStatus:
    """Keeps a run's run.json up to date. A context manager: a run that raises has failed.

    facts: what else the file has, as JSON values. say: gets one line where the file cannot be written; the run goes on.
    enabled: False on all ranks but the first, where nothing is written.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], *, say: Callable[[str], None], enabled: bool = True
    ) -> None:
        self.file, self.say, self.enabled = folder / STATUS_FILE, say, enabled
        self.content: dict[str, Any] = {"state": "running", "began": round(time.time()), **facts, "warnings": []}

    def __enter__(self) -> Self:
        self.write()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):  # of a signal before the first step
            self.end("stopped")
            self.say(f"Stopped. To resume:\n  {self.content['resume']}")
        elif error is not None:
            self.end("failed", first_line(error))

    def warn(self, step: int, warning: str) -> None:
        """Adds a warning, and says it. step: completed steps of the run."""
        self.say(f"warning: {warning}")
        if len(self.content["warnings"]) < MAX_WARNINGS:
            self.content["warnings"].append({"step": step, "text": warning})
            self.write()

    def end(self, state: State, error: str | None = None) -> None:
        """Says how the run ended. error: why it failed."""
        self.content |= {"state": state, "ended": round(time.time())} | ({"error": error} if error else {})
        self.write()

    def write(self) -> None:
        if not self.enabled:
            return
        try:
            replace_file(self.file, (json.dumps(self.content, indent=1, ensure_ascii=False) + "\n").encode())
        except (OSError, UnicodeEncodeError) as error:
            self.say(f"warning: {self.file}: not written: {error}; the run goes on")
