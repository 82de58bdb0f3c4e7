"""A run as its files tell of it, read anew where something has changed; runs that are part of the package; and all runs
of the folders, kept up to date by a thread.

A run trains while a process holds the lock of its folder. One whose run.json says that it trains, with nobody at the
lock, has died.
"""

import fcntl
import functools
import json
import math
import shlex
import threading
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ligermodels.board.folders import Place, descriptor_of, names_inside, open_inside, read_inside, walk
from ligermodels.board.series import CHUNK_BYTES, MetricSeries, parsed_line
from ligermodels.errors import first_line
from ligermodels.training.checkpoints.files import STEP
from ligermodels.training.reporting.metrics import COMPLETIONS_FILE, METRICS_FILE
from ligermodels.training.run.folder import ADAPTER, CHECKPOINTS, LOCK, MODEL, STATUS_FILE
from ligermodels.training.settings.settings import MAX_SETTINGS_BYTES, SETTINGS_FILE
from ligermodels.units import duration, loss_text

MAX_STATUS_BYTES = 2**18
MAX_TEXTS, MAX_TEXT_CHARACTERS = 200, 4000  # samples of a run that are shown; characters of one
MAX_COMPLETIONS = 64  # of a step
SHOWN_LOSSES = ("loss", "validation_loss")
TALLIED = ("tokens_per_second", "mfu", "peak_memory_gib", "reward", "rewards/margins")
PUBLISHED_FILE = "published.json"
MAX_RUNS = 500  # the newest
CHUNKS_IN_TURN = 1  # of a run, before the next run's are read
PAUSE = 0.5  # seconds between two looks at the files
SCAN_FACTOR = 20  # the folders are searched anew after this many times what it took
WITHOUT = {CHECKPOINTS, MODEL, ADAPTER, "tensorboard", "wandb"}  # folders of a run that hold no runs


@dataclass
class WatchedRun:
    """A run as its files tell of it. id: what requests name it by. name: shown to people."""

    id: str
    name: str
    place: Place
    metrics: MetricSeries = field(init=False)
    completions: MetricSeries = field(init=False)
    status: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    held: bool = False
    times: dict[str, tuple[int, int]] = field(default_factory=dict)  # of files when they were read: inode, mtime
    free_since: tuple[int, int] | None = None
    changed: int = 0  # the library's version of the last change
    newest: float = 0.0  # seconds, when it last wrote its metrics; before the first of them, its settings
    fault: str | None = None  # why it is read no more

    def __post_init__(self) -> None:
        self.metrics = MetricSeries(self.place.inside(METRICS_FILE), text="sample")
        self.completions = MetricSeries(self.place.inside(COMPLETIONS_FILE))

    def update(self, most: int) -> bool:
        """Reads what has changed; of the metrics at most `most` chunks. Returns whether anything has."""
        before = self.held, self.status, self.settings, self.newest
        self.note_newest()
        self.held = self.lock_is_held()
        if self.has_changed(STATUS_FILE):
            self.status = parsed(json.loads, self.place.inside(STATUS_FILE), MAX_STATUS_BYTES)
        if self.has_changed(SETTINGS_FILE):
            self.settings = parsed(tomllib.loads, self.place.inside(SETTINGS_FILE), MAX_SETTINGS_BYTES)
        return self.metrics.update(most) | ((self.held, self.status, self.settings, self.newest) != before)

    def note_newest(self) -> None:
        self.newest = (self.stamp(METRICS_FILE)[1] or self.stamp(SETTINGS_FILE)[1]) / 1e9

    def has_changed(self, name: str) -> bool:
        """Whether a file is another one than at the last call."""
        stamp = self.stamp(name)
        changed = stamp != self.times.get(name, (0, 0))
        self.times[name] = stamp
        return changed

    def stamp(self, name: str) -> tuple[int, int]:
        try:
            status = (self.place.path / name).lstat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def lock_is_held(self) -> bool:
        """Whether a process holds the lock. Who takes it writes it: one found free is not tried again until then."""
        stamp = self.stamp(LOCK)
        if stamp == (0, 0) or stamp == self.free_since:
            return False
        try:
            with descriptor_of(self.place.inside(LOCK)) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.free_since = stamp
        return False

    @property
    def state(self) -> str:
        """running, finished, stopped, failed, died; ended for a run without a run.json."""
        if self.held:
            return "running"
        said = self.status.get("state")
        if said in ("finished", "stopped", "failed"):
            return str(said)
        if said == "running":
            return "died"
        return "finished" if self.exports else "ended"

    @property
    def exports(self) -> list[str]:
        return [name for name in (MODEL, ADAPTER) if names_inside(self.place.inside(name))]

    def summary(self) -> dict[str, Any]:
        """What the list of runs shows."""
        read, warnings = round(self.metrics.done, 3), len(self.warnings())
        return summary_of(self) | {"eta": self.eta, "newest": self.newest, "read": read, "warnings": warnings}

    @property
    def eta(self) -> str | None:
        """The time that is left by the last line of metrics, while the run trains."""
        step, seconds = self.metrics.last.get("seconds_left", (-1, 0.0))
        return duration(seconds) if self.held and step == self.metrics.last_step else None

    def warnings(self) -> list[dict[str, Any]]:
        """Lists the warnings of the run, and what is wrong with its files."""
        said = self.status.get("warnings")
        found = [
            {"step": whole(entry.get("step")), "text": text(entry.get("text"))}
            for entry in (said if isinstance(said, list) else []) if isinstance(entry, dict)
        ]  # fmt: skip
        if self.fault is not None:
            found.append({"step": None, "text": self.fault})
        if lines := self.metrics.unreadable:
            found.append({"step": None, "text": f"{METRICS_FILE}: {lines:,} lines cannot be read and are left out"})
        return found

    def details(self) -> dict[str, Any]:
        """All that is known of the run besides its curves and texts."""
        folder, saved = str(self.place.path), saved_steps(self.place)
        return self.summary() | {
            "folder": folder, "settings": self.settings, "plan": text(self.status.get("plan")),
            "checkpoints": sorted(saved, key=saved.__getitem__), "exports": self.exports,
            "warnings": self.warnings(), "error": text(self.status.get("error")),
            "resume": command_to_resume(folder),
            "resumable": self.state not in ("running", "finished") and bool(self.settings),
            "began": self.status.get("began"), "ended": self.status.get("ended"),
            "has_completions": self.completions_range() is not None,
        }  # fmt: skip

    def samples(self) -> list[dict[str, Any]]:
        """The samples of the validations, at most MAX_TEXTS of them, evenly spaced."""
        found = []
        with suppress(OSError), open_inside(self.metrics.place) as stream:
            for step, place in self.metrics.some_texts(MAX_TEXTS):
                stream.seek(place)
                record = parsed_line(stream.readline(CHUNK_BYTES))
                if record is not None and record["step"] == step:
                    found.append({"step": step, "text": text(record.get("sample"))})
        return found

    def completions_range(self) -> tuple[int, int] | None:
        """The first and the last step with completions."""
        self.completions.update(10**6)
        chunks = self.completions.chunks
        return (chunks[0].first, chunks[-1].last) if chunks else None

    def completions_at(self, step: int) -> list[dict[str, Any]]:
        """The completions of a step, or of the last one before it that has some."""
        chunks = [chunk for chunk in self.completions.chunks if chunk.first <= step]
        records = self.completions.records_of(chunks[-2:])
        last = max((record["step"] for record in records if record["step"] <= step), default=None)
        shown = [record for record in records if record["step"] == last][:MAX_COMPLETIONS]
        return [{name: bounded_value(value) for name, value in record.items()} for record in shown]


def saved_steps(place: Place) -> dict[str, int]:
    """The steps of the checkpoints of a run, by the names of their folders."""
    found = map(STEP.fullmatch, names_inside(place.inside(CHECKPOINTS)))
    return {match[0]: int(match[1]) for match in found if match}


def command_to_resume(folder: str) -> str:
    """The command that people copy into a shell. It is made of the folder alone: files may say anything."""
    if not folder.isprintable():  # a terminal obeys control characters, also between quotes
        return f"# rename the folder {folder!a}"
    return f"ligermodels train --resume {shlex.quote(folder)}"


def parsed(parse: Any, place: Place, at_most: int) -> Mapping[str, Any]:
    """The content of a small file; empty for one that is none, or is damaged."""
    try:
        value = parse(read_inside(place, at_most).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def text(value: Any) -> str | None:
    return value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else None


def bounded_value(value: Any) -> Any:
    """A value of a line of a file, within bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | None) else str(value)[:MAX_TEXT_CHARACTERS]


@dataclass(frozen=True)
class PublishedRun:
    """A run of a real model, to look at beside one's own (docs/real-models.md), that answers as a `WatchedRun` does.

    It is read once, from the package; nothing trains, resumes or talks to it.
    """

    id: str
    name: str
    settings: Mapping[str, Any]
    metrics: MetricSeries = field(repr=False)
    state = "published"

    def summary(self) -> dict[str, Any]:
        return summary_of(self) | {"eta": None, "newest": 0, "read": 1, "warnings": 0}

    def details(self) -> dict[str, Any]:
        return self.summary() | {
            "settings": self.settings, "checkpoints": [], "exports": [], "warnings": [], "error": None,
            "resumable": False, "has_completions": False,
        }  # fmt: skip

    def samples(self) -> list[dict[str, Any]]:
        return []


def summary_of(run: WatchedRun | PublishedRun) -> dict[str, Any]:
    """What the list of runs shows of any run."""
    latest, settings = run.metrics.latest(), run.settings
    return {
        "id": run.id, "name": run.name, "state": run.state, "step": run.metrics.last_step,
        "steps": whole(settings.get("steps")), "model": text(settings.get("model")),
        "objective": text(settings.get("objective")) or "sft", "values": {name: latest.get(name) for name in TALLIED},
        "losses": {name: loss_text(latest[name]) for name in SHOWN_LOSSES if name in latest},
        "names": [*latest], "version": run.metrics.version,
    }  # fmt: skip


@functools.cache
def published_runs() -> dict[str, PublishedRun]:
    """The runs by their ids, which no run of a folder has."""
    content = json.loads(files("ligermodels.board").joinpath(PUBLISHED_FILE).read_bytes())
    return {f"published:{run['name']}": published_run(run) for run in content}


def published_run(run: Mapping[str, Any]) -> PublishedRun:
    """A run of the file: its name, its settings, and its curves, {name: [[step, value], …]}."""
    lines: dict[int, dict[str, float]] = defaultdict(dict)
    for name, points in run["curves"].items():
        for step, value in points:
            lines[step][name] = value
    metrics = MetricSeries.of({"step": step, **values} for step, values in sorted(lines.items()))
    return PublishedRun(f"published:{run['name']}", run["name"], run["settings"], metrics)


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
