"""Runs of real models that are part of the package, to look at beside one's own (docs/real-models.md). They are read
once, from a file; nothing trains, resumes or talks to them."""

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ligermodels.board.runs import SHOWN_LOSSES, TALLIED
from ligermodels.board.series import MetricSeries
from ligermodels.units import loss_text

PUBLISHED_FILE = "published.json"


@dataclass(frozen=True)
class PublishedRun:
    """A run that answers as a `WatchedRun` does."""

    id: str
    name: str
    settings: Mapping[str, Any]
    metrics: MetricSeries = field(repr=False)

    def summary(self) -> dict[str, Any]:
        latest = self.metrics.latest()
        return {
            "id": self.id, "name": self.name, "state": "published", "step": self.metrics.last_step,
            "steps": self.settings["steps"], "model": self.settings["model"], "objective": self.settings["objective"],
            "eta": None, "newest": 0, "values": {name: latest.get(name) for name in TALLIED},
            "losses": {name: loss_text(latest[name]) for name in SHOWN_LOSSES if name in latest},
            "names": [*latest], "version": self.metrics.version, "read": 1, "warnings": 0,
        }  # fmt: skip

    def details(self) -> dict[str, Any]:
        return self.summary() | {
            "settings": self.settings, "checkpoints": [], "exports": [], "warnings": [], "error": None,
            "resumable": False, "has_completions": False,
        }  # fmt: skip

    def samples(self) -> list[dict[str, Any]]:
        return []


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
