"""Runs as processes of their own: started, resumed, and stopped with a checkpoint.

A run lives on when the board ends. It is stopped by the signal that Ctrl-C's sibling SIGTERM sends (run/stopping.py),
whoever has started it: to the process that has the run's lock open, which no file can make believe.
"""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ligermodels.board.folders import Place, open_inside, read_inside
from ligermodels.errors import InputError
from ligermodels.training.run.folder import LOCK
from ligermodels.training.settings.config import TrainConfig
from ligermodels.training.settings.settings import as_json_value, as_toml
from ligermodels.weights.writing import replace_file

OWN_FOLDER = ".board"  # in the first folder: settings and outputs of the runs that were started here
LOG_BYTES = 8192  # the end of an output
EXIT_SECONDS = 60
HOLDER = re.compile(rb"process (\d{1,10}) on (.*)\n")


class Processes:
    """The runs that this board has started. folder: where new runs go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, settings: Mapping[str, Any], name: str) -> None:
        """Starts a run in the folder `name`. settings: as given, in the types of TrainConfig."""
        self.refuse_running(name)
        if os.path.lexists(self.folder / name):
            raise InputError(f"{name}: there is such a folder already; choose another name")
        TrainConfig(**settings)
        own = self.own_folder()
        lines = [f"{key} = {as_toml(as_json_value(value))}\n" for key, value in settings.items() if value is not None]
        file = own / f"{name}.toml"
        replace_file(file, "".join(lines).encode())
        self.launch(name, ["--config", str(file), "--output", str(self.folder / name)])

    def resume(self, place: Place) -> str:
        """Resumes a run in its folder; returns the name of its process."""
        name = place.relative.replace("/", "--") or "run"
        with suppress(KeyError, subprocess.TimeoutExpired):
            self.started[name].wait(EXIT_SECONDS)  # a process that has left its run takes a moment to exit
        self.refuse_running(name)
        self.launch(name, ["--resume", str(place.path)])
        return name

    def launch(self, name: str, arguments: list[str]) -> None:
        with self.open_log(name) as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, "-m", "ligermodels", "train", *arguments], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def open_log(self, name: str) -> BinaryIO:
        """The file for the output of a run, empty. Raises InputError, also for a pipe, which would block."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            log = os.fdopen(os.open(self.own_folder() / f"{name}.log", flags, 0o666), "wb")
        except OSError as error:
            raise InputError(f"{OWN_FOLDER}/{name}.log: cannot be written: {error.strerror}; remove it") from error
        if not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
            log.close()
            raise InputError(f"{OWN_FOLDER}/{name}.log: is not a regular file; remove it")
        return log

    def own_folder(self) -> Path:
        own = self.folder / OWN_FOLDER
        try:
            own.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{own}: cannot be made: {error.strerror}; make room or give permission") from error
        if own.is_symlink():
            raise InputError(f"{own}: is a link; replace it by a folder")
        return own

    def refuse_running(self, name: str) -> None:
        process = self.started.get(name)
        if process is not None and process.poll() is None:
            raise InputError(f"{name}: is running already")

    def stop(self, place: Place) -> None:
        """Has a run finish its step, save and exit. Raises InputError where no process of this machine trains it."""
        holder = self.holder(place)
        if holder is None:
            raise InputError(f"{place.relative}: no process of this machine trains it; stop it where it was started")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(holder, signal.SIGTERM)
        os.close(holder)

    def holder(self, place: Place) -> int | None:
        """A descriptor of the process that has a run's lock open; None where the one that the lock names has not."""
        lock = place.inside(LOCK)
        try:
            named = HOLDER.fullmatch(read_inside(lock, 300))
            if named is None or named[2] != socket.gethostname().encode():
                return None
            descriptor, there = os.pidfd_open(int(named[1])), lock.path.lstat()
        except (OSError, OverflowError):  # the latter for a number that no process has
            return None
        if any(os.path.samestat(there, status) for status in open_files(int(named[1]))):
            return descriptor
        os.close(descriptor)
        return None

    def cancel(self, name: str) -> None:
        """Ends a run that was started here and has not begun yet."""
        process = self.started.get(name)
        if process is None or process.poll() is not None:
            raise InputError(f"{name}: is not running")
        process.terminate()

    def seen(self, name: str) -> dict[str, Any]:
        """Whether a run that was started here still runs, its exit status, and the end of its output."""
        process = self.started.get(name)
        if process is None:
            return {"running": False, "status": None, "output": ""}
        status, output = process.poll(), ""
        with suppress(OSError), open_inside(Place(self.folder, f"{OWN_FOLDER}/{name}.log")) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            output = log.read().decode(errors="replace")
        return {"running": status is None, "status": status, "output": output}


def open_files(process: int) -> list[os.stat_result]:
    """What a process has open, as far as this user may see it."""
    found = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                found.append(os.stat(f"/proc/{process}/fd/{name}"))
    return found
