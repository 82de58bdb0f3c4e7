"""The numbers of a file of JSON lines with "step": new lines are read as they come, and memory stays bounded.

Of each number at most 2 KEPT rows (step, lowest, highest, mean, count) are kept. Where they are too few for a view of
a short range, the chunks of the file that have it are read again.

    R rows of a number
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ligermodels.board.folders import Place, open_inside

CHUNK_BYTES = 2**19  # read at a time; a longer line is left out
EXACT_CHUNKS = 2  # of a view that is read again
KEPT = 4096
MAX_NAMES, MAX_NAME_CHARACTERS = 128, 100
MAX_TEXTS = 1024  # of a chunk
STEP, LOW, HIGH, MEAN, COUNT = range(5)


class Chunk(NamedTuple):
    """Complete lines of the file: where they begin and end, their lowest and highest step."""

    begin: int
    end: int
    first: int
    last: int


@dataclass
class MetricSeries:
    """The numbers of one file. `update` reads; everything else answers from what was read by then.

    text: the name of the text whose lines are noted. texts: their steps, and where they begin.
    pending: whether the file has more than was read. version: grows whenever there is more to see.
    """

    place: Place
    text: str | None = None
    inode: int = 0
    size: int = 0
    position: int = 0  # bytes that were read
    pending: bool = False
    in_long_line: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # by name, rows [R, 5]; replaced, never changed
    last: dict[str, tuple[int, float]] = field(default_factory=dict)  # by name, the last step and value, never a mean
    texts: list[tuple[int, int]] = field(default_factory=list)
    unreadable: int = 0  # lines that are no JSON object with a step
    version: int = 0
    lock: Any = field(default_factory=Lock)

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> "MetricSeries":
        """The numbers of records that are in no file."""
        series = cls(Place(Path(), ""), version=1)
        series.add("".join(json.dumps(record) + "\n" for record in records).encode())
        return series

    def update(self, most: int) -> bool:
        """Reads up to `most` chunks that are new; returns whether there was anything to do."""
        with self.lock:
            try:
                with open_inside(self.place) as stream:
                    return self.update_from(stream, most)
            except OSError:
                changed = bool(self.chunks)
                self.restart(0)
                return changed

    def update_from(self, stream: BinaryIO, most: int) -> bool:
        status = os.fstat(stream.fileno())
        if status.st_ino != self.inode or status.st_size < self.size:
            self.restart(status.st_ino)
        if status.st_size == self.size and not self.pending and self.version:
            return False
        self.size, self.pending = status.st_size, True
        for _ in range(most):
            stream.seek(self.position)
            data = stream.read(CHUNK_BYTES)
            self.pending = self.position + len(data) < self.size
            self.add(data)
            if not self.pending:
                break
        self.version += 1
        return True

    def restart(self, inode: int) -> None:
        self.inode, self.size, self.position, self.pending, self.in_long_line = inode, 0, 0, False, False
        self.chunks, self.columns, self.last, self.texts, self.unreadable = [], {}, {}, [], 0
        self.version += 1

    def add(self, data: bytes) -> None:
        """Takes in the complete lines of bytes that begin at the position; half a line waits until it has its end."""
        end = data.rfind(b"\n") + 1
        if not end and len(data) == CHUNK_BYTES:
            self.unreadable += not self.in_long_line
            self.in_long_line = True
            end = len(data)
        elif end:
            begin = data.find(b"\n") + 1 if self.in_long_line else 0
            self.in_long_line = False
            self.add_lines(data[begin:end], self.position + begin)
        self.position += end

    def add_lines(self, data: bytes, begin: int) -> None:
        records, place, texts = [], begin, []
        for line in data.split(b"\n"):
            record = parsed_line(line)
            if record is not None:
                records.append(record)
                if self.text is not None and isinstance(record.get(self.text), str):
                    texts.append((record["step"], place))
            elif line:
                self.unreadable += 1
            place += len(line) + 1
        self.texts += texts[:MAX_TEXTS]
        if records:
            steps = [record["step"] for record in records]
            self.note(Chunk(begin, begin + len(data), min(steps), max(steps)))
            new = columns_of(records)
            self.columns = dict([*extended(self.columns, new).items()][:MAX_NAMES])
            self.last |= {
                name: (int(rows[-1, STEP]), float(rows[-1, MEAN])) for name, rows in new.items() if name in self.columns
            }

    def note(self, chunk: Chunk) -> None:
        """Adds a chunk; to the last one, where both together are no larger: a run writes line by line."""
        if self.chunks and chunk.end - self.chunks[-1].begin <= CHUNK_BYTES:
            last = self.chunks[-1]
            self.chunks[-1] = Chunk(last.begin, chunk.end, min(last.first, chunk.first), max(last.last, chunk.last))
        else:
            self.chunks.append(chunk)

    # -- views

    @property
    def done(self) -> float:
        """The fraction of the file that was read."""
        return self.position / self.size if self.pending else float(self.version > 0)

    @property
    def last_step(self) -> int | None:
        return max((chunk.last for chunk in self.chunks), default=None)

    def latest(self) -> dict[str, float]:
        """The last value of every number, by name."""
        return {name: value for name, (_, value) in self.last.items()}

    def view(self, names: Iterable[str], first: float, last: float, points: int) -> dict[str, np.ndarray]:
        """Rows [R, 5] of each name with steps from `first` to `last`, at most `points` of them."""
        columns = self.columns
        rows = {name: rows_between(columns[name], first, last) for name in names if name in columns}
        if any(len(found) < points and columns[name][:, COUNT].max() > 1 for name, found in rows.items()):
            chunks = [chunk for chunk in self.chunks if chunk.last >= first and chunk.first <= last]
            # While the file is being read, no part is read twice.
            if len(chunks) <= EXACT_CHUNKS and not self.pending:
                exact = columns_of(self.records_of(chunks))
                rows = {name: rows_between(exact[name], first, last) for name in rows if name in exact}
        return {name: reduced(found, points) for name, found in rows.items()}

    def some_texts(self, most: int) -> list[tuple[int, int]]:
        """(step, place) of lines with the text, at most `most` of them, evenly spaced, the last one included."""
        stride = max(1, -(-len(self.texts) // most))
        return self.texts[::-1][::stride][::-1]

    def records_of(self, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """The records of chunks, from the file."""
        try:
            with open_inside(self.place) as stream:
                read = b"".join(os.pread(stream.fileno(), c.end - c.begin, c.begin) for c in chunks)
        except OSError:
            return []
        return [record for line in read.split(b"\n") if (record := parsed_line(line)) is not None]


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for what is no object with a step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < 2**53
    return record if is_record else None


def columns_of(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """A row [R, 5] per finite value of each number that records have, in the order of their steps."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        step = record["step"]
        for name, value in record.items():
            if type(value) in (int, float) and abs(value) <= sys.float_info.max and len(name) <= MAX_NAME_CHARACTERS:
                found[name].append((step, value))
    found.pop("step", None)
    pairs = {name: np.array(values, np.float64) for name, values in found.items()}
    return {
        name: in_steps(np.column_stack([rows[:, [0, 1, 1, 1]], np.ones(len(rows))])) for name, rows in pairs.items()
    }


def in_steps(rows: np.ndarray) -> np.ndarray:
    steps = rows[:, STEP]
    return rows if (steps[1:] >= steps[:-1]).all() else rows[np.argsort(steps, kind="stable")]


def extended(kept: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins both; a number with more than 2 KEPT rows is reduced to KEPT."""
    joined = {
        name: in_steps(np.concatenate([kept[name], rows])) if name in kept else rows for name, rows in new.items()
    }
    return kept | {name: reduced(rows, KEPT) if len(rows) > 2 * KEPT else rows for name, rows in joined.items()}


def rows_between(rows: np.ndarray, first: float, last: float) -> np.ndarray:
    return rows[(rows[:, STEP] >= first) & (rows[:, STEP] <= last)]


def reduced(rows: np.ndarray, most: int) -> np.ndarray:
    """At most `most` rows: each stands for about equally many values, with their lowest, highest and mean."""
    if len(rows) <= most:
        return rows
    before = np.cumsum(rows[:, COUNT]) - rows[:, COUNT]
    starts = np.unique(np.searchsorted(before, np.linspace(0, rows[:, COUNT].sum(), most, endpoint=False), "right")) - 1
    counts = np.add.reduceat(rows[:, COUNT], starts)
    steps, means = (np.add.reduceat(rows[:, i] * rows[:, COUNT], starts) / counts for i in (STEP, MEAN))
    low, high = np.minimum.reduceat(rows[:, LOW], starts), np.maximum.reduceat(rows[:, HIGH], starts)
    return np.stack([steps, low, high, means, counts], 1)


def curve_text(rows: np.ndarray) -> str:
    """Steps, lowest, highest and mean values; the last three as one where each row is a single value. Written here
    because it is by far the most that is sent: digits that are not seen in a curve are left out."""
    values = [rows[:, MEAN]] if np.array_equal(rows[:, LOW], rows[:, HIGH]) else [rows[:, i] for i in (LOW, HIGH, MEAN)]
    parts = [",".join(map("{:.10g}".format, rows[:, STEP].tolist()))]
    parts += [",".join(map("{:.6g}".format, column.tolist())) for column in values]
    return "[" + ",".join(f"[{part}]" for part in parts) + "]"
