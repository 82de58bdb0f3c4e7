"""Token ids of many documents, one after the other, mapped from files, which need not fit in memory.

A store is written document by document, so that a stream of any length never is a list. Must not know rows or models.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from ligermodels.errors import InputError

DESCRIPTION = "store.json"


class Document(Protocol):
    """ids: as the model sees them, its end among them. supervised: which are to be predicted, None for all; that of the
    first means nothing. place: where it was read, as file:line."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def supervised(self) -> list[bool] | None: ...
    @property
    def place(self) -> str: ...


@dataclass(frozen=True)
class TokenStore:
    """D documents of N tokens in all.

    tokens: [N] uint16 or uint32. supervised: [N] bool, whether each is to be predicted; None for all of them.
    offsets: [D + 1] int64, where documents begin. hashes: [D] uint64, of the documents' tokens. places: [·] uint8, a
    line of UTF-8 a document that says where it was read; or the file that the tokens themselves are in.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    supervised: np.ndarray | None
    places: np.ndarray | str

    def __len__(self) -> int:
        return len(self.hashes)

    def place(self, token: int) -> str:
        """Where the document of tokens[token] was read."""
        if isinstance(self.places, str):
            return f"{self.places}: token {token}"
        document = int(np.searchsorted(self.offsets, token, side="right")) - 1
        ends = np.flatnonzero(self.places == ord("\n"))
        begin = 0 if document == 0 else ends[document - 1] + 1
        return self.places[begin : ends[document]].tobytes().decode()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write(documents: Iterable[Document], vocab_size: int, folder: Path) -> None:
    """Writes a store for `open_store` into an empty folder.

    Raises InputError for a token id outside the vocabulary, naming its place.
    """
    files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in dtypes(vocab_size)}
    try:
        masked = write_into(files, documents, vocab_size)
    finally:
        for file in files.values():
            file.close()
    if not masked:
        (folder / "supervised").unlink()
    (folder / DESCRIPTION).write_text(json.dumps({"vocab_size": vocab_size, "masked": masked}))


def open_store(folder: Path) -> TokenStore:
    """The store that `write` left there, mapped."""
    description = json.loads((folder / DESCRIPTION).read_text())
    masked = description["masked"]
    names = {name: dtype for name, dtype in dtypes(description["vocab_size"]).items() if masked or name != "supervised"}
    arrays = {name: np.memmap(folder / name, dtype, mode="r") for name, dtype in names.items()}
    return TokenStore(**({"supervised": None} | arrays))  # type: ignore[arg-type]


def dtypes(vocab_size: int) -> dict[str, np.dtype[Any]]:
    """The arrays that a store is made of, each a file of that name."""
    return {
        "tokens": token_dtype(vocab_size), "supervised": np.dtype(bool), "offsets": np.dtype(np.int64),
        "hashes": np.dtype(np.uint64), "places": np.dtype(np.uint8),
    }  # fmt: skip


def write_into(files: dict[str, BinaryIO], documents: Iterable[Document], vocab_size: int) -> bool:
    """Returns whether any document has a mask."""
    dtype, end, masked = token_dtype(vocab_size), 0, False
    files["offsets"].write(np.int64(0).tobytes())
    for document in documents:
        ids = np.array(document.ids, np.int64)
        refuse_unknown(ids, vocab_size, document.place)
        tokens = ids.astype(dtype)
        mask = np.ones(len(ids), bool) if document.supervised is None else np.array(document.supervised, bool)
        masked |= document.supervised is not None
        end += len(ids)
        files["tokens"].write(tokens.tobytes())
        files["supervised"].write(mask.tobytes())
        files["offsets"].write(np.int64(end).tobytes())
        files["hashes"].write(hash_of(tokens).tobytes())
        files["places"].write(document.place.replace("\n", " ").encode() + b"\n")
    return masked


def refuse_unknown(ids: np.ndarray, vocab_size: int, place: str, first: int = 0) -> None:
    """ids: of tokens from number `first` on of what is at `place`."""
    unknown = np.flatnonzero((ids >= vocab_size) | (ids < 0))
    if len(unknown):
        raise InputError(
            f"{place}: token {first + unknown[0]} has the id {ids[unknown[0]]}, outside the model's vocabulary of "
            f"{vocab_size}: take tokenizer and model from one folder"
        )


def hash_of(tokens: np.ndarray) -> np.uint64:
    """Of a document's content, whatever its dtype: the same on every machine and in every run."""
    digest = hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
