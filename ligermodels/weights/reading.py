"""Reads files that may be damaged or hostile: regular files of bounded size, and JSON of bounded depth and length.

Every bound is checked before memory is allocated for what it limits.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000  # the safetensors library's limit for a header; also used for all other JSON
MAX_JSON_VALUES = 1_000_000  # a tensor's header entry has seven, so a file can have 140,000 tensors
MAX_JSON_DEPTH = 100
MAX_INTEGER_CHARACTERS = 20  # of 64 bits, with a sign
STRINGS_AND_BRACKETS = re.compile(rb'"[^"]*"|[\[\]{}]')
DOWNLOAD_AGAIN = "download it again"
SNAPSHOTS = "snapshots"  # the folder of a repository's commits in the Hub's cache


def safe_file(folder: Path, name: str) -> Path:
    """The path of a regular file in the folder. The file is not opened, because opening a pipe would block.

    A symbolic link may leave the folder only for the blobs of the Hub's cache: `blobs/` of the repository or, since
    huggingface_hub 2, `blobs/ab/` of the whole cache. Raises CheckpointError.
    """
    file, home = folder / name, folder.resolve()
    if not os.path.isfile(file):
        fault = "is a broken link" if os.path.islink(file) and not os.path.exists(file) else "is not a regular file"
        raise CheckpointError(f"{file}: {fault if os.path.lexists(file) else 'is missing'}; {DOWNLOAD_AGAIN}")
    target, repository = file.resolve(), home.parent.parent
    cached = target.parent == repository / "blobs" or target.parent.parent == repository.parent / "blobs"
    if not target.is_relative_to(home) and not (home.parent.name == SNAPSHOTS and cached):
        raise CheckpointError(f"{file}: is a link that leads out of the folder, to {target}; replace it by the file")
    return file


def weights_file(folder: Path, name: str) -> Path:
    """The path of a regular file of weights in the folder: in a download as `safe_file`, which see.

    In any other folder, which a person has named, it may be a link to anywhere: large files lie on other disks. Raises
    CheckpointError.
    """
    is_download = folder.resolve().parent.name == SNAPSHOTS
    return folder / name if not is_download and os.path.isfile(folder / name) else safe_file(folder, name)


@contextmanager
def open_for_reading(file: Path) -> Iterator[BufferedReader]:
    """The file, open for reading bytes. Raises CheckpointError if it is not regular, or the system reports an error."""
    refuse_irregular(file)
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error.strerror}; check its permissions and its disk"
        ) from error


def refuse_irregular(file: Path) -> None:
    """Raises CheckpointError for a pipe, a device or the like: opening it could block, or reading it never end. Also
    for a path with a zero character, for which opening raises ValueError."""
    if "\0" in str(file):
        raise CheckpointError(f"{str(file)!r}: has a zero character, which no path can have; correct it")
    if os.path.exists(file) and not os.path.isfile(file):
        raise CheckpointError(f"{file}: is not a regular file; replace it by one")


def read_bytes(file: Path, at_most: int) -> bytes:
    """The content of a file. Raises CheckpointError if it cannot be read or has more than `at_most` bytes."""
    with open_for_reading(file) as stream:
        data = stream.read(at_most + 1)
    if len(data) > at_most:
        raise CheckpointError(f"{file}: has more than {at_most} bytes, the most that are read; {DOWNLOAD_AGAIN}")
    return data


def read_text(file: Path, at_most: int) -> str:
    """The text of a UTF-8 file, with every line ending as \\n. Raises CheckpointError, also if it has more bytes."""
    try:
        return TextIOWrapper(BytesIO(read_bytes(file, at_most)), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: is not UTF-8 text: {error}") from None


def refuse_text(file: Path, start: bytes) -> None:
    """Raises CheckpointError if the file begins like a Git LFS pointer or a web page."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file}: is a Git LFS pointer in place of the file; run `git lfs pull`")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{file}: is a web page in place of the file; {DOWNLOAD_AGAIN}")


def read_json(file: Path, *, may_be_huge: Container[str] = ()) -> dict[str, Any]:
    """A JSON object from a file of at most MAX_JSON_BYTES. Raises CheckpointError as `parse_json` does."""
    data = read_bytes(file, MAX_JSON_BYTES)
    refuse_text(file, data[:64])
    return parse_json(data, file, may_be_huge=may_be_huge)


def parse_json(data: bytes, file: Path, *, may_be_huge: Container[str] = ()) -> dict[str, Any]:
    """Parses a JSON object of bounded length and depth. Fields must be unique; numbers must be finite and fit 64 bits.

    may_be_huge: fields whose numbers may be larger; they are parsed as infinity.
    Raises CheckpointError naming the file and the field.
    """
    if has_more_values(data, MAX_JSON_VALUES):
        raise CheckpointError(f"{file}: has more than {MAX_JSON_VALUES} JSON values; {DOWNLOAD_AGAIN}")
    repeated: list[str] = []

    def fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            repeated.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return fields

    try:
        # An integer that is too long for 64 bits becomes infinite; `unbounded_numbers` finds it with its field name.
        value = json.loads(
            data.decode(),
            parse_int=lambda digits: int(digits) if len(digits) <= MAX_INTEGER_CHARACTERS else math.inf,
            object_pairs_hook=fields_once,
        )
        unbounded = next((field for field in unbounded_numbers(value) if field not in may_be_huge), None)
    except RecursionError:
        raise CheckpointError(f"{file}: {deepest_field(data)}is nested too deeply; {DOWNLOAD_AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}; {DOWNLOAD_AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; {DOWNLOAD_AGAIN}")
    if repeated:
        raise CheckpointError(f"{file}: field {repeated[0]} is given more than once; keep one")
    if unbounded is not None:
        raise CheckpointError(f"{file}: field {unbounded} is not a finite number of 64 bits; correct it")
    return value


def unbounded_numbers(value: Any, depth: int = 0) -> Iterator[str]:
    """The fields of the numbers that are not finite or do not fit 64 bits, such as `rope_scaling.factor` or `ids[1]`.

    Names are composed for these fields only: a name may be as long as the file. Raises RecursionError if the value is
    nested deeper than MAX_JSON_DEPTH.
    """
    if depth > MAX_JSON_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (f"{'.' if depth else ''}{key}{inner}" for inner in unbounded_numbers(item, depth + 1))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from (f"[{index}]{inner}" for inner in unbounded_numbers(item, depth + 1))
    elif isinstance(value, int | float) and not (
        math.isfinite(value) and (isinstance(value, float) or -(2**63) <= value < 2**63)
    ):
        yield ""


def deepest_field(data: bytes) -> str:
    """The top-level field whose brackets nest deeper than MAX_JSON_DEPTH, as 'field "x" ': the last string before they
    open; "" without one.

    Without escapes strings can be matched without backtracking, whose stack would take a hundred times the memory of
    the text.
    """
    plain = without_escapes(data)
    depth, field = 0, slice(0, 0)
    for token in STRINGS_AND_BRACKETS.finditer(plain):
        start = token.start()
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(plain[start : start + 1], 0)
        if depth > MAX_JSON_DEPTH:
            break
        if depth == 1 and plain.startswith(b'"', start):
            field = slice(*token.span())
    return f"field {data[field].decode()} " if field.stop else ""


def has_more_values(data: bytes, limit: int) -> bool:
    """Whether a JSON text has more than `limit` values, which is known without parsing it, or as many strings."""
    if separators(data) <= limit:
        return False
    plain = without_escapes(data)
    if plain.count(b'"') > 4 * limit:  # each value may have a name
        return True
    outside_strings = b"".join(plain.split(b'"')[::2])
    return separators(outside_strings) > limit


def separators(data: bytes) -> int:
    """Commas and opening brackets; a JSON text has at most one value more."""
    return sum(map(data.count, (b",", b"[", b"{")))


def without_escapes(data: bytes) -> bytes:
    """A JSON text with escaped quotes and backslashes overwritten, so that each quote begins or ends a string."""
    return data.replace(rb"\\", b"__").replace(rb"\"", b"__")
