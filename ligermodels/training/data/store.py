"""Token ids of many documents, one after the other, mapped from files, which need not fit in memory.

On disk a token takes two bytes or four, and one more where any document has a mask; a document takes 24: where it
begins, its hash, and its line in the file that it was read in. A store is written by batches of documents, so that a
stream of any length never is a list. Must not know rows or models.
"""

import bisect
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from ligermodels.errors import InputError

DESCRIPTION = "store.json"
BATCH_TOKENS = 2**18  # written at a time
NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})?", re.DOTALL)
NO_NUMBER = -1


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
class Places:
    """Where each of D documents was read: most often in the file of the one before it, at another line.

    firsts: ascending, the documents at which another origin begins; the origins of the documents from there on.
    numbers: [D] int64, what stands behind the origin, NO_NUMBER for nothing.
    """

    firsts: list[int]
    origins: list[str]
    numbers: np.ndarray

    def __getitem__(self, document: int) -> str:
        origin = self.origins[bisect.bisect_right(self.firsts, document) - 1]
        number = int(self.numbers[document])
        return origin if number == NO_NUMBER else f"{origin}{number}"


@dataclass(frozen=True)
class TokenStore:
    """D documents of N tokens in all.

    tokens: [N] uint16 or uint32. supervised: [N] bool, whether each is to be predicted; None for all of them.
    offsets: [D + 1] int64, where documents begin. hashes: [D] uint64, of the documents' tokens. places: of the
    documents, or the file that the tokens themselves are in.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    supervised: np.ndarray | None
    places: Places | str

    def __len__(self) -> int:
        return len(self.hashes)

    def place(self, token: int) -> str:
        """Where the document of tokens[token] was read."""
        if isinstance(self.places, str):
            return f"{self.places}: token {token}"
        return self.places[int(np.searchsorted(self.offsets, token, side="right")) - 1]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write(documents: Iterable[Document], vocab_size: int, folder: Path) -> None:
    """Writes a store for `open_store` into an empty folder.

    Raises InputError for a token id outside the vocabulary, naming its place.
    """
    files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in dtypes(vocab_size)}
    writer = Writer(files, vocab_size)
    try:
        for batch in batches(documents):
            writer.write(batch)
    finally:
        for file in files.values():
            file.close()
    if not writer.masked:
        (folder / "supervised").unlink()
    description = {"vocab_size": vocab_size, "masked": writer.masked}
    described = description | {"firsts": writer.firsts, "origins": writer.origins}
    (folder / DESCRIPTION).write_text(json.dumps(described))


def open_store(folder: Path) -> TokenStore:
    """The store that `write` left there, mapped."""
    description = json.loads((folder / DESCRIPTION).read_text())
    masked = description["masked"]
    names = {name: dtype for name, dtype in dtypes(description["vocab_size"]).items() if masked or name != "supervised"}
    arrays = {name: mapped(folder / name, dtype) for name, dtype in names.items()}
    places = Places(description["firsts"], description["origins"], arrays.pop("numbers"))
    return TokenStore(**({"supervised": None} | arrays), places=places)  # type: ignore[arg-type]


def mapped(file: Path, dtype: Any) -> np.ndarray:
    """A file's numbers; nothing cannot be mapped."""
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


def dtypes(vocab_size: int) -> dict[str, np.dtype[Any]]:
    """The arrays that a store is made of, each a file of that name."""
    return {
        "tokens": token_dtype(vocab_size), "supervised": np.dtype(bool), "offsets": np.dtype(np.int64),
        "hashes": np.dtype(np.uint64), "numbers": np.dtype(np.int64),
    }  # fmt: skip


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Of about BATCH_TOKENS each, or one longer document."""
    batch: list[Document] = []
    tokens = 0
    for document in documents:
        batch.append(document)
        tokens += len(document.ids)
        if tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


class Writer:
    """Appends documents to the files of a store.

    tokens: written so far. masked: whether any document has a mask; masks are written from the first such on, behind
    ones for all tokens before it. firsts, origins: as those of `Places`.
    """

    def __init__(self, files: dict[str, BinaryIO], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self.tokens = self.documents = 0
        self.masked = False
        self.firsts: list[int] = []
        self.origins: list[str] = []
        files["offsets"].write(np.int64(0).tobytes())

    def write(self, batch: Sequence[Document]) -> None:
        stops = np.cumsum([len(document.ids) for document in batch])
        ids = np.fromiter(itertools.chain.from_iterable(d.ids for d in batch), np.int64, count=stops[-1])
        if outside(ids, self.vocab_size):
            for document in batch:
                refuse_unknown(np.array(document.ids, np.int64), self.vocab_size, document.place)
        tokens = ids.astype(token_dtype(self.vocab_size))
        self.files["tokens"].write(tokens.data)
        self.write_masks(batch)
        self.files["offsets"].write((stops + self.tokens).tobytes())
        self.files["hashes"].write(b"".join(digests([(tokens, stops.tolist())])))
        self.files["numbers"].write(np.array([self.number(d.place) for d in batch], np.int64).data)
        self.tokens += len(tokens)

    def write_masks(self, batch: Sequence[Document]) -> None:
        if not self.masked and any(document.supervised is not None for document in batch):
            self.masked = True
            for start in range(0, self.tokens, BATCH_TOKENS):
                self.files["supervised"].write(b"\1" * min(BATCH_TOKENS, self.tokens - start))
        if self.masked:
            masks = (b"\1" * len(d.ids) if d.supervised is None else bytes(d.supervised) for d in batch)
            self.files["supervised"].write(b"".join(masks))

    def number(self, place: str) -> int:
        """What stands behind the origin of the next document, which is noted where it is another."""
        origin, number = NUMBERED.fullmatch(place).groups()  # type: ignore[union-attr]
        if not self.origins or self.origins[-1] != origin:
            self.firsts.append(self.documents)
            self.origins.append(origin)
        self.documents += 1
        return NO_NUMBER if number is None else int(number)


def outside(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(len(ids)) and bool(ids.max() >= vocab_size or ids.min() < 0)


def refuse_unknown(ids: np.ndarray, vocab_size: int, place: str, first: int = 0) -> None:
    """ids: of tokens from number `first` on of what is at `place`."""
    if outside(ids, vocab_size):
        unknown = np.flatnonzero((ids >= vocab_size) | (ids < 0))
        raise InputError(
            f"{place}: token {first + unknown[0]} has the id {ids[unknown[0]]}, outside the model's vocabulary of "
            f"{vocab_size}: take tokenizer and model from one folder"
        )


def digests(blocks: Iterable[tuple[np.ndarray, Sequence[int]]]) -> Iterator[bytes]:
    """Of each document's content 8 bytes, a little-endian uint64: the same whatever the dtype of the tokens.

    blocks: tokens, and where in them documents end; the last goes on in the next block, of which there may be many.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tokens, stops in blocks:
        content = tokens.astype("<u4").data.cast("B")
        begin = 0
        for stop in stops:
            digest.update(content[4 * begin : 4 * stop])
            yield digest.digest()
            digest, begin = hashlib.blake2b(digest_size=8), stop
        digest.update(content[4 * begin :])
