"""The folders that the board may use: what lies in them, and files opened without leaving them.

A request never has a path: it names what was found here. A file is opened component by component, none of them a
symbolic link, so that no link, wherever it leads, is followed, also one that is made meanwhile.
"""

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ligermodels.errors import InputError

MAX_DEPTH, MAX_FOLDERS = 6, 20_000  # of what is searched below a folder


class Place(NamedTuple):
    """A path below one of the folders. root: resolved."""

    root: Path
    relative: str

    @property
    def path(self) -> Path:
        return self.root / self.relative

    @property
    def name(self) -> str:
        """What people are shown."""
        return self.relative or self.root.name

    def inside(self, name: str) -> "Place":
        return Place(self.root, os.path.join(self.relative, name) if self.relative else name)


def open_folders(folders: Sequence[Path]) -> list[Path]:
    """The folders, resolved. Raises InputError for what is none."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a folder; give one that exists")
    return list(dict.fromkeys(folder.resolve() for folder in folders))


@contextmanager
def descriptor_of(place: Place) -> Iterator[int]:
    """The open descriptor of a file or folder, for reading. Raises OSError, also where a component is a link."""
    held = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in Path(place.relative).parts:
            if part == "..":
                raise PermissionError("a path may not go up")
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=held)
            os.close(held)
            held = inner
        yield held
    finally:
        os.close(held)


@contextmanager
def open_inside(place: Place) -> Iterator[BinaryIO]:
    """A regular file, open for reading bytes. Raises OSError."""
    with descriptor_of(place) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{place.path}: is not a regular file")
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            yield stream


def read_inside(place: Place, at_most: int) -> bytes:
    """The first `at_most` bytes of a regular file. Raises OSError."""
    with open_inside(place) as stream:
        return stream.read(at_most)


def names_inside(place: Place) -> list[str]:
    """The names in a folder, sorted; none where it cannot be read."""
    try:
        with descriptor_of(place) as descriptor:
            return sorted(os.listdir(descriptor))
    except OSError:
        return []


def walk(root: Path, without: Collection[str] = ()) -> Iterator[tuple[Place, list[str]]]:
    """The folders below `root`, itself included, with the names of their files. Hidden folders and links are left out.

    without: names of folders that are left out too. Stops after MAX_FOLDERS: what is searched must not become endless.
    """
    waiting, seen = [(Place(root, ""), 0)], 0
    while waiting and seen < MAX_FOLDERS:
        place, depth = waiting.pop()
        seen += 1
        try:
            entries = sorted(os.scandir(place.path), key=lambda entry: entry.name, reverse=True)
        except OSError:
            continue
        yield place, [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        waiting += [
            (place.inside(entry.name), depth + 1)
            for entry in entries
            if depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False)
            if not entry.name.startswith(".") and entry.name not in without
        ]


def is_within(path: str | Path, roots: Sequence[Path]) -> bool:
    """Whether a path, with all its links followed, lies in one of the folders."""
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    return any(resolved.is_relative_to(root) for root in roots)


def links_stay_within(folder: Path, roots: Sequence[Path]) -> bool:
    """Whether every file of a folder, links followed, lies in one of `roots`: a loader follows links."""
    return all(is_within(path, roots) for path in (folder, *folder.iterdir()))
