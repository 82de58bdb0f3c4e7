"""The numbers of a file of JSON lines with "step", read in blocks: bounded memory, whatever the size of the file.

A block is 32 KiB of the file, more for a large one. Of each number that its lines have, a block keeps BUCKETS rows
(step, lowest, highest, mean, count), and what a view of few blocks needs beyond that is read from the file again.
Blocks are read in an order in which any first part of them is spread over the file (van der Corput), the last one
first: a curve is there at once, and becomes finer. Must not know what the numbers mean.

    B bytes in a block, R rows, N points of a view
"""

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ligermodels.board.folders import Place, open_inside

BLOCK_BYTES, MAX_BLOCKS = 2**15, 4096  # of a file that is larger than both together, a block is larger
BUCKETS = 16  # rows that a block keeps of each number
MAX_NAMES, MAX_NAME_CHARACTERS = 128, 100  # of the numbers of a block
MAX_TEXTS = 64  # of a block
MAX_LINE_BYTES = 2**20  # a longer line is left out
EXACT_BYTES = 2**20  # a view of fewer bytes is read from the file, if the rows that were kept are too few for it
STEP, LOW, HIGH, MEAN, COUNT = range(5)
NOTHING = np.empty((0, 5))
NUMERIC = {float, int, type(None)}  # bool is none of them
RowsByName = Mapping[str, np.ndarray]  # by name, rows [R, 5] of STEP, LOW, HIGH, MEAN, COUNT


@dataclass(frozen=True)
class FileBlock:
    """What is kept of a block. first, last: its steps. texts: where the lines with a text begin, by their steps."""

    first: int
    last: int
    columns: RowsByName
    texts: Sequence[tuple[int, int]] = ()
    unreadable: int = 0


EMPTY = FileBlock(-1, -1, {})


class FileState(NamedTuple):
    """What tells a file from one that has replaced it, and its bytes."""

    inode: int
    size: int


NO_FILE = FileState(0, 0)


@dataclass
class MetricSeries:
    """The numbers of one file. `update` reads; everything else answers from what was read by then.

    text: the name of the text whose lines are noted.
    """

    place: Place
    text: str | None = None
    state: FileState = NO_FILE
    block_bytes: int = BLOCK_BYTES
    blocks: dict[int, FileBlock] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    tail: int = -1  # bytes of the file when its last block was read
    version: int = 0  # grows whenever there is more to see
    known: tuple[int, dict[str, float]] = (-1, {})  # the version of `latest`, and what it was

    def update(self, most: int) -> bool:
        """Reads up to `most` blocks that were not read, or have changed; returns whether there was anything to do."""
        try:
            with open_inside(self.place) as stream:
                return self.update_from(stream.fileno(), most)
        except OSError:
            changed = bool(self.blocks)
            self.restart(NO_FILE)
            return changed

    def update_from(self, file: int, most: int) -> bool:
        status = os.fstat(file)
        state = FileState(status.st_ino, status.st_size)
        if state.inode != self.state.inode or state.size < self.state.size or self.is_too_large(state.size):
            self.restart(state)
        if state == self.state and not self.pending and self.tail == state.size:
            return False
        self.extend(state)
        for _ in range(min(most, len(self.pending))):
            number = self.pending.pop()
            self.blocks[number] = self.read_block(file, number)
            if number == (state.size - 1) // self.block_bytes:
                self.tail = state.size
        self.version += 1
        return True

    def is_too_large(self, size: int) -> bool:
        return size > 2 * MAX_BLOCKS * self.block_bytes

    def restart(self, state: FileState) -> None:
        self.state, self.tail = FileState(state.inode, 0), -1
        self.blocks, self.pending, self.block_bytes = {}, [], BLOCK_BYTES
        while state.size > MAX_BLOCKS * self.block_bytes:
            self.block_bytes *= 2
        self.version += 1

    def extend(self, state: FileState) -> None:
        """Adds the blocks that the file has beyond those known to the pending ones, and the last one of those."""
        before, now = (-(-size // self.block_bytes) for size in (self.state.size, state.size))
        if state.size != self.state.size:
            new = [*range(max(0, before - 1), now)]
            waiting = {*self.pending, *new}
            self.pending = spread([number for number in range(now) if number in waiting])[::-1]
        self.state = state

    @property
    def done(self) -> float:
        """The fraction of the file that was read."""
        if self.version == 0:
            return 0.0
        return 1 - len(self.pending) / max(1, len(self.pending) + len(self.blocks))

    @property
    def unreadable(self) -> int:
        """Lines that are no JSON object with a step, as far as the file was read."""
        return sum(block.unreadable for block in list(self.blocks.values()))

    def read_block(self, file: int, number: int) -> FileBlock:
        begin = number * self.block_bytes
        lines, unreadable = lines_of(file, begin, begin + self.block_bytes, self.state.size)
        records, damaged = parse_lines([line for _, line in lines])
        texts = []
        if self.text is not None:
            texts = [
                (record["step"], offset)
                for (offset, _), record in zip(lines, records, strict=True)
                if record is not None and isinstance(record.get(self.text), str)
            ][:MAX_TEXTS]
        usable = [record for record in records if record is not None]
        steps = [record["step"] for record in usable] or [-1]
        columns = {name: reduced(rows, BUCKETS) for name, rows in columns_of(usable).items()}
        return FileBlock(min(steps), max(steps), columns, texts, unreadable + damaged)

    # -- views

    def in_order(self, first: float, last: float) -> list[tuple[int, FileBlock]]:
        """The blocks that were read and have steps between these, with their numbers."""
        found = [(number, block) for number, block in list(self.blocks.items()) if block.first >= 0]
        return sorted((n, b) for n, b in found if b.last >= first and b.first <= last)

    def latest(self) -> dict[str, float]:
        """The mean of the last row of every number, by name: those of the first blocks first."""
        if self.known[0] != self.version:
            values: dict[str, float] = {}
            for _, block in self.in_order(-np.inf, np.inf):
                values |= {name: float(rows[-1, MEAN]) for name, rows in block.columns.items()}
            self.known = self.version, dict(itertools.islice(values.items(), MAX_NAMES))
        return self.known[1]

    def view(self, names: Iterable[str], first: float, last: float, points: int) -> dict[str, np.ndarray]:
        """Rows [R, 5] of each name with steps from `first` to `last`, at most `points` of them."""
        blocks = self.in_order(first, last)
        # While a file is being read, its blocks are not read twice.
        coarse = len(blocks) * BUCKETS < points and not self.pending
        if coarse and len(blocks) * self.block_bytes <= EXACT_BYTES:
            records = [record for number, _ in blocks for record in self.records_of(number)]
            parts: list[RowsByName] = [columns_of(records)]
        else:
            parts = [block.columns for _, block in blocks]
        return {name: reduced(joined(parts, name, first, last), points) for name in names}

    def records_of(self, number: int) -> list[dict[str, Any]]:
        """The records of a block, from the file."""
        try:
            with open_inside(self.place) as stream:
                begin = number * self.block_bytes
                lines, _ = lines_of(stream.fileno(), begin, begin + self.block_bytes, self.state.size)
        except OSError:
            return []
        return [record for record in parse_lines([line for _, line in lines])[0] if record is not None]

    @property
    def last_step(self) -> int | None:
        return max((block.last for block in list(self.blocks.values()) if block.first >= 0), default=None)


def lines_of(file: int, begin: int, end: int, size: int) -> tuple[list[tuple[int, bytes]], int]:
    """The complete lines that begin in [begin, end) of a file of `size` bytes, each with its place, and how many were
    left out because they are too long."""
    start = max(0, begin - 1)  # where a line begins at `begin`, the byte before ends a line
    data = os.pread(file, min(end, size) - start, start)
    while data and not data.endswith(b"\n") and len(data) < end - start + MAX_LINE_BYTES and start + len(data) < size:
        more = os.pread(file, BLOCK_BYTES, start + len(data))
        cut = more.find(b"\n")
        data += more if cut < 0 else more[: cut + 1]
        if not more:
            break
    skipped = data.find(b"\n") + 1 if begin else 0
    if begin and not skipped:
        return [], 0
    position, found, long = start + skipped, [], 0
    for line in data[skipped:].split(b"\n")[:-1]:
        if len(line) > MAX_LINE_BYTES:
            long += 1
        elif line:
            found.append((position, line))
        position += len(line) + 1
    cut_off = not data.endswith(b"\n") and start + len(data) < size  # too long to look for its end
    return found, long + cut_off


def parse_lines(lines: Sequence[bytes]) -> tuple[list[dict[str, Any] | None], int]:
    """The object of each line, None for one that is no object with a step; and how many those are."""
    try:
        records = json.loads(b"[" + b",".join(lines) + b"]")  # one call for all of them is the fastest
        if len(records) != len(lines):
            raise ValueError
    except (ValueError, RecursionError):
        records = [value_of_line(line) for line in lines]
    checked = [record if is_record(record) else None for record in records]
    return checked, checked.count(None)


def value_of_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_record(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("step")) is int and 0 <= value["step"] < 2**53


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Of each number that records have, a row [R, 5] per value, in the order of the records."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[tuple(record)].append(record)
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for names, alike in groups.items():
        steps = np.array([record["step"] for record in alike], np.float64)
        for name, values in zip(names, zip(*(record.values() for record in alike), strict=True), strict=True):
            if name == "step" or len(name) > MAX_NAME_CHARACTERS or (name not in parts and len(parts) == MAX_NAMES):
                continue
            if (numbers := as_numbers(values)) is not None:
                finite = np.isfinite(numbers)
                parts[name].append(rows_of(steps[finite], numbers[finite]))
    return {name: in_steps(found) for name, found in parts.items() if sum(map(len, found))}


def as_numbers(values: Sequence[Any]) -> np.ndarray | None:
    """float64 [R], NaN for null; None where a value is no number."""
    if not NUMERIC.issuperset(map(type, values)):
        return None
    try:
        return np.array(values, np.float64)
    except OverflowError:
        return None


def rows_of(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.stack([steps, values, values, values, np.ones_like(values)], 1)


def in_steps(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of several parts, in the order of their steps."""
    rows = np.concatenate(parts) if parts else NOTHING
    return rows if len(parts) < 2 else rows[np.argsort(rows[:, STEP], kind="stable")]


def joined(parts: Iterable[RowsByName], name: str, first: float, last: float) -> np.ndarray:
    rows = in_steps([part[name] for part in parts if name in part])
    return rows[(rows[:, STEP] >= first) & (rows[:, STEP] <= last)]


def reduced(rows: np.ndarray, most: int) -> np.ndarray:
    """At most `most` rows: each stands for equally many of those given, with their lowest, highest and mean."""
    if len(rows) <= most:
        return rows
    starts = np.linspace(0, len(rows), most, endpoint=False).astype(int)
    counts = np.add.reduceat(rows[:, COUNT], starts)
    means = np.add.reduceat(rows[:, MEAN] * rows[:, COUNT], starts) / counts
    steps = np.add.reduceat(rows[:, STEP] * rows[:, COUNT], starts) / counts
    low, high = np.minimum.reduceat(rows[:, LOW], starts), np.maximum.reduceat(rows[:, HIGH], starts)
    return np.stack([steps, low, high, means, counts], 1)


def spread(numbers: Sequence[int]) -> list[int]:
    """The last number, the first, then the others in van der Corput order: any first part is spread over all."""
    count = len(numbers)
    bits = max(1, (count - 1).bit_length())
    order = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))
    return list(dict.fromkeys([*numbers[-1:], *(numbers[i] for i in order if i < count)]))


def noted(series: MetricSeries, most: int) -> Iterator[tuple[int, int]]:
    """(step, place) of lines with the text, at most `most` of them, evenly spaced, the last one included."""
    found = [text for _, block in series.in_order(-np.inf, np.inf) for text in block.texts]
    stride = max(1, -(-len(found) // most))
    yield from found[::-1][::stride][::-1]
