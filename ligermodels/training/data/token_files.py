"""Files of token ids, mapped: numpy's .npy, and .bin, raw numbers, little-endian, with a .json beside it.

    tokens.json    {"dtype": "uint16", "end_of_text": 50256}        dtype: uint16 or uint32

Documents end with the end-of-text token: that of the .json, which a .npy may have too, else the model's. Knows no text.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.store import TokenStore, digests, mapped, refuse_unknown

INDEX = {"offsets": np.int64, "hashes": np.uint64}
BLOCK = 2**22  # tokens
EXAMPLE = '{"dtype": "uint16", "end_of_text": 0}'


def write_index(tokens: np.memmap, end: int, vocab_size: int, place: str, folder: Path) -> None:
    """Reads all tokens once, and writes into an empty folder where their documents are, with a hash of each.

    end: the end-of-text token. Raises InputError for a token outside the vocabulary, naming place and offset.
    """
    progress = Progress(f"Reading {place}", tokens.nbytes)
    with progress, (folder / "offsets").open("wb") as offsets, (folder / "hashes").open("wb") as hashes:
        offsets.write(np.int64(0).tobytes())

        def blocks() -> Iterator[tuple[np.ndarray, list[int]]]:
            for start, block, stops in blocks_of(tokens, end):
                progress.show(start * tokens.itemsize)
                refuse_unknown(block, vocab_size, place, start)
                offsets.write((stops + start).tobytes())
                yield block, stops.tolist()

        hashes.writelines(digests(blocks()))


def open_indexed(tokens: np.ndarray, place: str, folder: Path) -> TokenStore:
    """The documents of a file's tokens, by the index in that folder."""
    offsets, hashes = (mapped(folder / name, dtype) for name, dtype in INDEX.items())
    return TokenStore(tokens, offsets, hashes, None, place)


def open_tokens(file: Path) -> np.memmap:
    """[N] unsigned integers, mapped."""
    try:
        tokens = np.load(file, mmap_mode="r") if file.suffix.lower() == ".npy" else raw(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as tokens: {first_line(error)}") from error
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise InputError(f"{file}: must be one row of integers, the ids of tokens")
    if not len(tokens):
        raise InputError(f"{file}: holds no tokens")
    return tokens


def raw(file: Path) -> np.memmap:
    dtype = described(file).get("dtype")
    if dtype not in ("uint16", "uint32"):
        beside = file.with_suffix(".json")
        raise InputError(
            f"{beside}: field dtype is {dtype!r}; {file.name} needs this file, as {EXAMPLE}, uint16 or uint32"
        )
    size = np.dtype(dtype).itemsize
    if file.stat().st_size % size:
        raise InputError(
            f"{file}: has {file.stat().st_size} bytes, no multiple of the {size} of {dtype}; it was cut off"
        )
    if not file.stat().st_size:
        raise InputError(f"{file}: holds no tokens")
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")


def described(file: Path) -> dict[str, Any]:
    """What the .json beside a file says of it, nothing where there is none."""
    beside = file.with_suffix(".json")
    try:
        value = json.loads(beside.read_text()) if beside.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{beside}: not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise InputError(f"{beside}: must be an object as {EXAMPLE}")
    return value


def stated_end(file: Path) -> int | None:
    """The end-of-text token that the .json says; None where it says none."""
    value = described(file).get("end_of_text")
    if value is not None and (type(value) is not int or value < 0):
        raise InputError(f"{file.with_suffix('.json')}: field end_of_text is {value!r}; must be the id of a token")
    return value


def blocks_of(tokens: np.memmap, end: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """All tokens in order: where a block begins, its tokens, and where in it documents end, the last with the file."""
    for start in range(0, len(tokens), BLOCK):
        block = read_block(tokens, start)
        stops = np.flatnonzero(block == end) + 1
        if start + len(block) == len(tokens) and block[-1] != end:
            stops = np.append(stops, len(block))
        yield start, block, stops


def read_block(tokens: np.memmap, start: int) -> np.ndarray:
    """Read, not mapped: all pages of the mapping that are touched once would count as this process's memory."""
    assert tokens.filename is not None
    return np.fromfile(tokens.filename, tokens.dtype, BLOCK, offset=tokens.offset + start * tokens.itemsize)
