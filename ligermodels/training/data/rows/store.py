"""The token store: the token ids of many documents, one after the other, memory-mapped from files; and the disk cache.

A store may be larger than memory. On disk a token takes two or four bytes, and one more if any document has a mask. A
document takes 24 bytes: its offset, its hash, and its line in the file from which it was read. A store is written in
batches of documents, so that a stream of any length is never held as a list. An image takes some 40 bytes beside its
path; one that was given as bytes is stored as it was encoded, a file stays where it is, and nothing is decoded here.

The cache has folders of derived data, such as stores, that are filled once, however many ranks and runs need them. They
are in $XDG_CACHE_HOME/ligermodels/data, by default ~/.cache/ligermodels/data. A folder's name is a hash of everything
that its content depends on. The cache only saves time: all of it may be deleted at any time.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ligermodels import images, tokenizer
from ligermodels.distributed import local_rank, raise_on_all, waiting_group
from ligermodels.errors import InputError
from ligermodels.weights.user_cache import code_hash, fill_once, user_cache

FILL_TIMEOUT = timedelta(days=2)  # for another rank to fill the folders
DESCRIPTION = "store.json"
STORE_BATCH_TOKENS = 2**18  # written at a time
PLACE_WITH_NUMBER = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})?", re.DOTALL)
NO_NUMBER = -1
IMAGE_SOURCES = "image_sources"
IMAGE_ARRAYS = {
    "starts": np.int64, "stops": np.int64, "heights": np.int32, "widths": np.int32, "features": np.int32,
    "source_ends": np.int64, "is_path": np.bool_,
}  # fmt: skip


def cached_folder(key: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """Returns the folder of `key`, a JSON object.

    Every rank must call this; the first rank of each host fills a new folder. fill: writes the content to the path that
    it is given. If it raises an InputError, every rank raises it.
    """
    return cached_folders([(key, fill)])[0]


def cached_folders(requests: Sequence[tuple[dict[str, Any], Callable[[Path], None]]]) -> list[Path]:
    """Returns the folders of several pairs of key and fill; ranks synchronise once for all of them."""
    keys = (json.dumps(key | {"code": code_of_data()}, sort_keys=True).encode() for key, _ in requests)
    folders = [cache_folder() / hashlib.sha256(key).hexdigest()[:32] for key in keys]
    error = None
    if local_rank() == 0:
        try:
            for folder, (_, fill) in zip(folders, requests, strict=True):
                fill_once(folder, fill)
        except InputError as failure:
            error = failure
    with waiting_group(FILL_TIMEOUT) as group:
        raise_on_all(error, group)
    return folders


def cache_folder() -> Path:
    return user_cache("data")


def code_of_data() -> str:
    """Returns a hash of the modules that make data, so that folders written by another version of them are not used."""
    return code_hash(
        Path(__file__).parents[1], *(Path(path) for module in (images, tokenizer) for path in module.__path__)
    )


class DocumentImage(NamedTuple):
    """An image of a document, whose tokens are ids[start:stop], between them those of text about its parts.

    source: the bytes of a file, or its path. height, width: of the upright image, from which its tokens were planned.
    features: how many of the tokens stand for the image.
    """

    start: int
    stop: int
    source: bytes | str
    height: int
    width: int
    features: int


@dataclass(frozen=True)
class StoredImages:
    """The I images of a store, in the order of their tokens, tokens[starts:stops]. starts, stops: [I] int64.

    heights, widths, features: [I] int32. sources: the bytes of all images or paths; number i ends at source_ends[i].
    is_path: [I] bool, whether a source is the path of a file.
    """

    starts: np.ndarray
    stops: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    features: np.ndarray
    source_ends: np.ndarray
    is_path: np.ndarray
    sources: np.ndarray

    def between(self, start: int, stop: int) -> range:
        """Returns the numbers of the images whose tokens are within tokens[start:stop]."""
        return range(*np.searchsorted(self.starts, [start, stop]).tolist())

    def source(self, number: int) -> bytes | str:
        begin = 0 if number == 0 else int(self.source_ends[number - 1])
        content = self.sources[begin : int(self.source_ends[number])].tobytes()
        return content.decode("utf-8", "surrogateescape") if self.is_path[number] else content

    @property
    def file_versions(self) -> str:
        """A hash of the files' sizes and times of change: another one where an image may be another."""
        digest = hashlib.sha256()
        for number in np.flatnonzero(self.is_path).tolist():
            try:
                status = os.stat(self.source(number))
                digest.update(f"{status.st_size} {status.st_mtime_ns},".encode())
            except OSError:  # reading the image will say what is wrong
                digest.update(b"missing,")
        return digest.hexdigest()


def source_bytes(source: bytes | str) -> bytes:
    return source if isinstance(source, bytes) else source.encode("utf-8", "surrogateescape")


class ImageWriter:
    """Appends the images of documents to files in a folder, which `stack` closes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        names = (*(f"image_{name}" for name in IMAGE_ARRAYS), IMAGE_SOURCES)
        self.files: dict[str, BinaryIO] = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        self.end = 0

    def write(self, images: Sequence[DocumentImage], first: int) -> None:
        """Appends the images of a document. first: the number of the document's first token in the store."""
        contents = [source_bytes(image.source) for image in images]
        self.files[IMAGE_SOURCES].write(b"".join(contents))
        ends = self.end + np.cumsum([len(content) for content in contents])
        self.end = int(ends[-1])
        columns = {
            "starts": [first + image.start for image in images], "stops": [first + image.stop for image in images],
            "heights": [image.height for image in images], "widths": [image.width for image in images],
            "features": [image.features for image in images], "source_ends": ends,
            "is_path": [isinstance(image.source, str) for image in images],
        }  # fmt: skip
        for name, column in columns.items():
            self.files[f"image_{name}"].write(np.array(column, IMAGE_ARRAYS[name]).data)


def open_images(folder: Path) -> StoredImages:
    """Returns the images of the store in a folder, memory-mapped."""
    dtypes = IMAGE_ARRAYS | {"sources": np.uint8}
    names = [field.name for field in fields(StoredImages)]
    return StoredImages(*(np.memmap(folder / f"image_{name}", dtypes[name], mode="r") for name in names))


class Document(NamedTuple):
    """A tokenised document.

    ids: with the end-of-text token or whatever else ends the document. supervised: whether each token is in the loss;
    None for all. The value for the first token has no effect: that token is context. place: where the document was
    read, as file:line. images: in the order of their tokens.
    """

    ids: list[int]
    supervised: list[bool] | None
    place: str
    images: Sequence[DocumentImage] = ()


@dataclass(frozen=True)
class Places:
    """Where each of D documents was read. Most are in the same file as the document before, on another line.

    origins: the places without their numbers, as "file:", one for each run of documents that share it. firsts: the
    first document of each run, ascending. numbers: [D] int64, the number at the end of each place, or NO_NUMBER.
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
    """D documents of N tokens in total.

    tokens: [N] uint16 or uint32. supervised: [N] bool, whether each token is in the loss; None for all of them.
    offsets: [D + 1] int64, where documents begin. hashes: [D] uint64, of the documents' tokens and of their images'
    sources. places: of the documents, or the name of the token file from which all of them come. images: None if no
    document has one.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    supervised: np.ndarray | None
    places: Places | str
    images: StoredImages | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def features_before(self) -> np.ndarray:
        """The number of image tokens before each document, and of all: int64 [D + 1]."""
        if self.images is None:
            return np.zeros(len(self.offsets), np.int64)
        before = np.concatenate([[0], np.cumsum(self.images.features, dtype=np.int64)])
        return before[np.searchsorted(self.images.starts, self.offsets)]

    def place(self, token: int) -> str:
        """Returns where the document that contains tokens[token] was read."""
        if isinstance(self.places, str):
            return f"{self.places}: token {token}"
        return self.places[int(np.searchsorted(self.offsets, token, side="right")) - 1]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write_store(documents: Iterable[Document], vocab_size: int, folder: Path) -> None:
    """Writes documents to an empty folder, for `open_store`.

    Raises InputError for a token id outside the vocabulary, naming its place.
    """
    with ExitStack() as stack:
        writer = StoreWriter(folder, vocab_size, stack)
        for batch in document_batches(documents):
            writer.write(batch)
    if not writer.masked:
        (folder / "supervised").unlink()
    description = {
        "vocab_size": vocab_size, "masked": writer.masked, "firsts": writer.firsts, "origins": writer.origins,
    }  # fmt: skip
    (folder / DESCRIPTION).write_text(json.dumps(description))


def open_store(folder: Path) -> TokenStore:
    """Returns the store that `write_store` wrote to a folder, memory-mapped."""
    description = json.loads((folder / DESCRIPTION).read_text())
    masked, dtypes = description["masked"], array_dtypes(description["vocab_size"])
    names = [name for name in dtypes if masked or name != "supervised"]
    arrays = {name: map_file(folder / name, dtypes[name]) for name in names}
    places = Places(description["firsts"], description["origins"], arrays.pop("numbers"))
    images = open_images(folder) if (folder / IMAGE_SOURCES).exists() else None
    return TokenStore(**({"supervised": None} | arrays), places=places, images=images)  # type: ignore[arg-type]


def map_file(file: Path, dtype: Any) -> np.ndarray:
    """Returns the numbers in a file, memory-mapped; an empty file, which cannot be mapped, gives an empty array."""
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


def array_dtypes(vocab_size: int) -> dict[str, np.dtype[Any]]:
    """Returns the arrays of a store, each in a file of that name, and their dtypes."""
    return {
        "tokens": token_dtype(vocab_size), "supervised": np.dtype(bool), "offsets": np.dtype(np.int64),
        "hashes": np.dtype(np.uint64), "numbers": np.dtype(np.int64),
    }  # fmt: skip


def document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields batches that end with the document that reaches STORE_BATCH_TOKENS tokens."""
    batch: list[Document] = []
    tokens = 0
    for document in documents:
        batch.append(document)
        tokens += len(document.ids)
        if tokens >= STORE_BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


class StoreWriter:
    """Appends documents to the files of a store, which `stack` closes.

    tokens, documents: written so far. masked: whether any document so far has a mask. Masks are written from the first
    such document on, after ones for all tokens before it. firsts, origins: as in `Places`.
    """

    def __init__(self, folder: Path, vocab_size: int, stack: ExitStack) -> None:
        names = array_dtypes(vocab_size)
        self.files: dict[str, BinaryIO] = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        self.folder, self.vocab_size, self.stack = folder, vocab_size, stack
        self.tokens = self.documents = 0
        self.masked = False
        self.firsts: list[int] = []
        self.origins: list[str] = []
        self.files["offsets"].write(np.int64(0).tobytes())

    @functools.cached_property
    def images(self) -> ImageWriter:
        """Writes images; its files are made for the first one."""
        return ImageWriter(self.folder, self.stack)

    def write(self, batch: Sequence[Document]) -> None:
        stops = np.cumsum([len(document.ids) for document in batch])
        ids = np.fromiter(itertools.chain.from_iterable(d.ids for d in batch), np.int64, count=stops[-1])
        if has_unknown_ids(ids, self.vocab_size):
            for document in batch:
                refuse_unknown_ids(np.array(document.ids, np.int64), self.vocab_size, document.place)
        tokens = ids.astype(token_dtype(self.vocab_size))
        self.files["tokens"].write(tokens.data)
        self.write_masks(batch)
        self.files["offsets"].write((stops + self.tokens).tobytes())
        hashes = document_hashes([(tokens, stops.tolist())])
        self.files["hashes"].write(b"".join(with_images(*pair) for pair in zip(hashes, batch, strict=True)))
        for document, stop in zip(batch, stops.tolist(), strict=True):
            if document.images:
                self.images.write(document.images, self.tokens + stop - len(document.ids))
        self.files["numbers"].write(np.array([self.add_place(d.place) for d in batch], np.int64).data)
        self.tokens += len(tokens)

    def write_masks(self, batch: Sequence[Document]) -> None:
        if not self.masked and any(document.supervised is not None for document in batch):
            self.masked = True
            for start in range(0, self.tokens, STORE_BATCH_TOKENS):
                self.files["supervised"].write(b"\1" * min(STORE_BATCH_TOKENS, self.tokens - start))
        if self.masked:
            masks = (b"\1" * len(d.ids) if d.supervised is None else bytes(d.supervised) for d in batch)
            self.files["supervised"].write(b"".join(masks))

    def add_place(self, place: str) -> int:
        """Returns the number at the end of the next document's place; records the origin if it is a new one."""
        origin, number = PLACE_WITH_NUMBER.fullmatch(place).groups()  # type: ignore[union-attr]
        if not self.origins or self.origins[-1] != origin:
            self.firsts.append(self.documents)
            self.origins.append(origin)
        self.documents += 1
        return NO_NUMBER if number is None else int(number)


def with_images(tokens: bytes, document: Document) -> bytes:
    """Returns the hash of a document, given that of its tokens.

    Equal questions about other images are other documents.
    """
    if not document.images:
        return tokens
    digest = hashlib.blake2b(tokens, digest_size=8)
    for image in document.images:
        digest.update(hashlib.blake2b(source_bytes(image.source)).digest())
    return digest.digest()


def has_unknown_ids(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(len(ids)) and bool(ids.max() >= vocab_size or ids.min() < 0)


def refuse_unknown_ids(ids: np.ndarray, vocab_size: int, place: str, first: int = 0) -> None:
    """Raises InputError for an id outside the vocabulary. ids: of the tokens at `place`, from number `first` on."""
    if has_unknown_ids(ids, vocab_size):
        unknown = np.flatnonzero((ids >= vocab_size) | (ids < 0))
        raise InputError(
            f"{place}: token {first + unknown[0]} has the id {ids[unknown[0]]}, outside the model's vocabulary of "
            f"{vocab_size}: use the tokenizer that belongs to the model"
        )


def document_hashes(blocks: Iterable[tuple[np.ndarray, Sequence[int]]]) -> Iterator[bytes]:
    """Yields a hash of 8 bytes for each document's tokens, a little-endian uint64 that does not depend on their dtype.

    blocks: pairs of tokens and the places in them where documents end. A document may span any number of blocks.
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
