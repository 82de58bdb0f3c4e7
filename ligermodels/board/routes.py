"""What the addresses answer that read runs. A request names a run by an id that was given out, never by a path."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ligermodels.board.access import Refusal
from ligermodels.board.library import Library
from ligermodels.board.runs import WatchedRun
from ligermodels.board.series import HIGH, LOW, MAX_NAMES, MEAN, STEP
from ligermodels.board.server import Encoded, Events, PageRequest, Route

MAX_POINTS, MAX_ROWS = 4000, 400_000  # of a curve, of an answer
HEARTBEAT = 15.0  # seconds; a page that has left is noticed by it


def run_routes(library: Library) -> dict[tuple[str, str], Route]:
    """Returns the routes that read the runs."""

    def run_of(request: PageRequest) -> WatchedRun:
        run = library.runs.get(request.query.get("run", ""))
        if run is None:
            raise Refusal(404, "there is no such run")
        return run

    def events(request: PageRequest) -> Events:
        return Events(changes(library))

    def curves(request: PageRequest) -> Encoded:
        runs = [library.runs[id] for id in request.query.get("runs", "").split("\n") if id in library.runs]
        names = request.query.get("names", "").split("\n")[:MAX_NAMES]
        points = min(MAX_POINTS, MAX_ROWS // max(1, len(runs) * len(names)), int(number_of(request, "points", 1000)))
        first, last = number_of(request, "first", 0), number_of(request, "last", 2.0**53)
        parts = []
        for run in runs:
            version, views = run.metrics.version, run.metrics.view(names, first, last, max(2, points))
            drawn = ",".join(f"{json.dumps(name)}:{curve_text(rows)}" for name, rows in views.items() if len(rows))
            parts.append(f'{json.dumps(run.id)}:{{"version":{version},"curves":{{{drawn}}}}}')
        return Encoded("{" + ",".join(parts) + "}")

    def completions(request: PageRequest) -> dict[str, Any]:
        run = run_of(request)
        span = run.completions_range()
        step = int(number_of(request, "step", span[1] if span else 0))
        return {"range": span, "completions": run.completions_at(step) if span else []}

    return {
        ("GET", "/api/events"): events,
        ("GET", "/api/curves"): curves,
        ("GET", "/api/run"): lambda request: run_of(request).details(),
        ("GET", "/api/samples"): lambda request: run_of(request).samples(),
        ("GET", "/api/completions"): completions,
    }


def changes(library: Library) -> Iterator[Mapping[str, Any] | None]:
    """All runs, then those that have changed, with the ids of all that there are."""
    version = -1
    while not library.over.is_set():
        now = library.version
        yield {"runs": library.newer_than(version), "ids": [*library.runs]}
        version = now
        while not library.over.is_set() and library.wait(version, HEARTBEAT) == version:
            yield None


def number_of(request: PageRequest, name: str, default: float) -> float:
    """A number of the query. Raises Refusal."""
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = np.nan
    if not abs(value) <= 2.0**53:
        raise Refusal(400, f"{name} is not a number")
    return value


def curve_text(rows: np.ndarray) -> str:
    """Steps, lowest, highest and mean values; the last three as one where each row is a single value.

    Written here because it is by far the most that is sent: digits that are not seen in a curve are left out.
    """
    values = [rows[:, MEAN]] if np.array_equal(rows[:, LOW], rows[:, HIGH]) else [rows[:, i] for i in (LOW, HIGH, MEAN)]
    parts = [",".join(map("{:.10g}".format, rows[:, STEP].tolist()))]
    parts += [",".join(map("{:.6g}".format, column.tolist())) for column in values]
    return "[" + ",".join(f"[{part}]" for part in parts) + "]"
