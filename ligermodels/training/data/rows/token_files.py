"""Files of token ids, memory-mapped: numpy's .npy, and .bin, which has raw little-endian numbers and a .json beside it.

    tokens.json    {"dtype": "uint16", "end_of_text": 50256}        dtype: uint16 or uint32

Documents end with the end-of-text token: the one in the .json, which a .npy may have too, otherwise the tokenizer's.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.formats.streams import ReadingProgress
from ligermodels.training.data.rows.store import TokenStore, document_hashes, map_file, refuse_unknown_ids
from ligermodels.weights.reading import read_json, refuse_irregular

MAX_HEADER_BYTES = 10_000  # numpy's own limit
INDEX_ARRAYS = {"offsets": np.int64, "hashes": np.uint64}
READ_TOKENS = 2**22  # read at a time
TOKEN_FILE_EXAMPLE = '{"dtype": "uint16", "end_of_text": 0}'


def write_index(
    tokens: np.memmap, end: int, vocab_size: int, image_tokens: Mapping[int, str], place: str, folder: Path
) -> None:
    """Reads all tokens once, and writes the documents' offsets and hashes to an empty folder.

    end: the end-of-text token. image_tokens: those that stand for images, by id. Raises InputError for one of them and
    for a token outside the vocabulary, naming place and offset.
    """
    progress = ReadingProgress(f"Reading {place}", tokens.nbytes)
    with progress, (folder / "offsets").open("wb") as offsets, (folder / "hashes").open("wb") as hashes:
        offsets.write(np.int64(0).tobytes())

        def blocks() -> Iterator[tuple[np.ndarray, list[int]]]:
            for start, block, stops in blocks_with_stops(tokens, end):
                progress.show(start * tokens.itemsize)
                refuse_unknown_ids(block, vocab_size, place, start)
                refuse_image_ids(block, image_tokens, place, start)
                offsets.write((stops + start).tobytes())
                yield block, stops.tolist()

        hashes.writelines(document_hashes(blocks()))


def refuse_image_ids(ids: np.ndarray, image_tokens: Mapping[int, str], place: str, first: int) -> None:
    """Raises InputError for a token that stands for an image. ids: of the tokens at `place`, from number `first` on."""
    found = np.flatnonzero(np.isin(ids, list(image_tokens)))
    if len(found):
        token = image_tokens[int(ids[found[0]])]
        raise InputError(
            f"{place}: token {first + found[0]} is {token}, which stands for an image; remove such documents, or give "
            "records with images"
        )


def open_indexed(tokens: np.ndarray, place: str, folder: Path) -> TokenStore:
    """Returns the documents of a token file, from the index that `write_index` wrote to a folder."""
    offsets, hashes = (map_file(folder / name, dtype) for name, dtype in INDEX_ARRAYS.items())
    return TokenStore(tokens, offsets, hashes, None, place)


def open_tokens(file: Path) -> np.memmap:
    """Returns the tokens of a .npy or .bin file: [N] integers, memory-mapped. Raises InputError naming the file."""
    refuse_irregular(file)
    try:
        tokens = open_npy(file) if file.suffix.lower() == ".npy" else open_raw(file)
    except InputError:
        raise
    except Exception as error:  # numpy parses a header as Python source, and raises whatever that raises
        raise InputError(f"{file}: cannot be read as tokens: {first_line(error)}") from error
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise InputError(f"{file}: must be a one-dimensional array of integers, the token ids")
    if not len(tokens):
        raise InputError(f"{file}: contains no tokens")
    return tokens


def open_npy(file: Path) -> np.memmap:
    with file.open("rb") as stream:
        size_bytes = 2 if np.lib.format.read_magic(stream) == (1, 0) else 4
        size = int.from_bytes(stream.read(size_bytes), "little")
    if size > MAX_HEADER_BYTES:  # numpy reads a header before it checks its size
        raise InputError(f"{file}: has a header of {size} bytes, more than {MAX_HEADER_BYTES}; it is not a .npy file")
    return np.lib.format.open_memmap(file, mode="r")


def open_raw(file: Path) -> np.memmap:
    dtype = read_description(file).get("dtype")
    if dtype not in ("uint16", "uint32"):
        description = file.with_suffix(".json")
        raise InputError(
            f"{description}: field dtype is {dtype!r}; {file.name} needs this file with a dtype of uint16 or uint32, "
            f"such as {TOKEN_FILE_EXAMPLE}"
        )
    size = np.dtype(dtype).itemsize
    if file.stat().st_size % size:
        raise InputError(
            f"{file}: has {file.stat().st_size} bytes, not a multiple of the {size} of {dtype}: the file is truncated "
            "or the dtype is wrong"
        )
    if not file.stat().st_size:
        raise InputError(f"{file}: contains no tokens")
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")


def read_description(file: Path) -> dict[str, Any]:
    """Returns the content of the .json beside a token file; empty if there is none."""
    description = file.with_suffix(".json")
    return read_json(description) if description.exists() else {}


def described_end(file: Path) -> int | None:
    """Returns the end-of-text token given in the .json beside a token file; None if it gives none."""
    value = read_description(file).get("end_of_text")
    if value is not None and (type(value) is not int or value < 0):
        raise InputError(f"{file.with_suffix('.json')}: field end_of_text is {value!r}; must be a token id")
    return value


def blocks_with_stops(tokens: np.memmap, end: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields all tokens in order, as (start of the block, its tokens, the places in it where documents end).

    The last document ends with the file.
    """
    for start in range(0, len(tokens), READ_TOKENS):
        block = read_block(tokens, start)
        stops = np.flatnonzero(block == end) + 1
        if start + len(block) == len(tokens) and block[-1] != end:
            stops = np.append(stops, len(block))
        yield start, block, stops


def read_block(tokens: np.memmap, start: int) -> np.ndarray:
    """Reads the file, not the mapping: every page of the mapping that is touched counts as this process's memory."""
    assert tokens.filename is not None
    return np.fromfile(tokens.filename, tokens.dtype, READ_TOKENS, offset=tokens.offset + start * tokens.itemsize)
