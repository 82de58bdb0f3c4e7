"""The runs of the folders, kept up to date by a thread that reads what they write."""

import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ligermodels.board.folders import walk
from ligermodels.board.runs import WatchedRun
from ligermodels.errors import first_line
from ligermodels.training.reporting.metrics import METRICS_FILE
from ligermodels.training.run.folder import ADAPTER, CHECKPOINTS, MODEL
from ligermodels.training.settings.settings import SETTINGS_FILE

MAX_RUNS = 500  # the newest
CHUNKS_IN_TURN = 1  # of a run, before the next run's are read
PAUSE = 0.5  # seconds between two looks at the files
SCAN_FACTOR = 20  # the folders are searched anew after this many times what it took
WITHOUT = {CHECKPOINTS, MODEL, ADAPTER, "tensorboard", "wandb"}  # folders of a run that hold no runs


class Library:
    """The runs of some folders. A context manager: inside, a thread keeps it up to date. Requests read what is there;
    `wait` lets them wait for more."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self.runs: dict[str, WatchedRun] = {}
        self.version = 0
        self.changed = threading.Condition()
        self.over = threading.Event()
        self.hurry = threading.Event()  # a request wants the folders to be searched now
        self.thread = threading.Thread(target=self.work, name="runs", daemon=True)

    def __enter__(self) -> "Library":
        self.scan()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.hurry.set()
        self.thread.join()
        self.notify([])

    def work(self) -> None:
        next_scan = 0.0
        while not self.over.is_set():
            begin = time.monotonic()
            if begin >= next_scan or self.hurry.is_set():
                self.hurry.clear()
                self.scan()
                next_scan = time.monotonic() + max(2.0, SCAN_FACTOR * (time.monotonic() - begin))
            if not self.read():
                self.hurry.wait(PAUSE)

    def scan(self) -> None:
        """Finds the runs that are there."""
        found = [
            WatchedRun(f"{number}:{place.relative}", place.name, place)
            for number, root in enumerate(self.folders)
            for place, names in walk(root, WITHOUT)
            if {METRICS_FILE, SETTINGS_FILE} & set(names)
        ]
        for run in found:
            run.note_newest()
        newest = sorted(found, key=lambda run: run.newest, reverse=True)[:MAX_RUNS]
        runs = {run.id: self.runs.get(run.id, run) for run in newest}
        if runs.keys() != self.runs.keys():
            self.runs = runs
            self.notify([])

    def read(self) -> bool:
        """Reads some of what every run has written; returns whether anything is left to read."""
        pending = False
        for run in list(self.runs.values()):
            if self.update(run):
                self.notify([run])
                pending |= run.metrics.pending
        return pending

    def update(self, run: WatchedRun) -> bool:
        """Reads some of what a run has written. One that cannot be read, whatever it holds, keeps no other waiting."""
        if run.fault is not None:
            return False
        try:
            return run.update(CHUNKS_IN_TURN)
        except Exception as error:
            traceback.print_exc()
            run.fault = f"cannot be read: {type(error).__name__}: {first_line(error)}"
            return True

    def notify(self, runs: Sequence[WatchedRun]) -> None:
        with self.changed:
            self.version += 1
            for run in runs:
                run.changed = self.version
            self.changed.notify_all()

    def look_again(self) -> None:
        """Has the folders searched at once."""
        self.hurry.set()

    def wait(self, version: int, seconds: float) -> int:
        """Waits until there is more than at `version`; returns the version there is."""
        with self.changed:
            self.changed.wait_for(lambda: self.version > version or self.over.is_set(), seconds)
            return self.version

    def newer_than(self, version: int) -> list[dict[str, Any]]:
        """The summaries of runs that have changed since."""
        return [run.summary() for run in list(self.runs.values()) if run.changed > version]
