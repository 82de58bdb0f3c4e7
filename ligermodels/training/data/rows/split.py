"""The validation split: which documents are for validation and which for training.

The split depends only on the documents and the fraction, not on the seed, the number of ranks or the sequence length.
This module knows nothing about rows.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ligermodels.training.data.rows.store import TokenStore, document_hashes

DEFAULT_FRACTION, SMALL_DATA_FRACTION = 0.01, 0.05
DEFAULT_MIN_TOKENS, DEFAULT_MAX_TOKENS = 2**14, 2**17
MAX_OVERSHOOT = 10  # whole documents may have up to this many times the given fraction of all tokens


@dataclass(frozen=True)
class Selection:
    """D documents of a store, at tokens[begin:end]. begins, ends: [D] int64. hashes: [D] uint64, of the contents."""

    store: TokenStore
    begins: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    def select(self, mask: np.ndarray) -> "Selection":
        """The documents for which `mask` [D] bool is True."""
        return Selection(self.store, self.begins[mask], self.ends[mask], self.hashes[mask])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the documents' contents and positions."""
        digest = hashlib.sha256()
        for array in (self.begins, self.ends, self.hashes):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        return int((self.ends - self.begins).sum())

    @property
    def supervised(self) -> int:
        """The number of supervised tokens; the first token of a document is never supervised."""
        if self.store.supervised is None:
            return int(np.maximum(self.ends - self.begins - 1, 0).sum())
        bounds = zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        return sum(int(np.count_nonzero(self.store.supervised[begin + 1 : end])) for begin, end in bounds)


def default_fraction(stores: Sequence[TokenStore]) -> float:
    """The validation fraction if none is given.

    It is larger for small data, whose validation loss would otherwise be that of a few documents, and smaller for large
    data, so that each validation stays short.
    """
    tokens = sum(len(store.tokens) for store in stores)
    fraction = max(DEFAULT_FRACTION, min(SMALL_DATA_FRACTION, DEFAULT_MIN_TOKENS / tokens))
    return min(fraction, DEFAULT_MAX_TOKENS / tokens)


def all_documents(store: TokenStore) -> Selection:
    return Selection(store, store.offsets[:-1], store.offsets[1:], store.hashes)


def split_documents(store: TokenStore, fraction: float) -> tuple[Selection, Selection]:
    """(training, validation). Validation has the documents with the smallest hashes: `fraction` of them, at least one.
    Copies of a document have the same hash and so are on the same side.

    If these documents have far more than `fraction` of the tokens, as in a store of a few long documents, validation
    has the end of the store instead, and the document at the boundary is cut in two, unless documents have images.
    """
    documents = all_documents(store)
    count = max(1, round(len(store) * fraction))
    chosen = documents.hashes <= np.partition(documents.hashes, count - 1)[count - 1]
    validation = documents.select(chosen)
    is_whole = store.images is not None or validation.tokens <= MAX_OVERSHOOT * fraction * documents.tokens
    if len(store) > 1 and is_whole:
        return documents.select(~chosen), validation
    return split_at_token(documents, documents.tokens - max(2, round(documents.tokens * fraction)))


def split_at_token(documents: Selection, place: int) -> tuple[Selection, Selection]:
    """The parts before and after tokens[place], which is the last target of the first and context in the second."""
    place = max(place, 0)
    document = int(np.searchsorted(documents.ends, place, side="right"))
    before = with_boundary(documents, slice(document + 1), None, place + 1)
    return before, with_boundary(documents, slice(document, None), place, None)


def with_boundary(documents: Selection, part: slice, begin: int | None, end: int | None) -> Selection:
    """A part of the documents, with a new begin for its first one, or a new end for its last one."""
    begins, ends, hashes = (x[part].copy() for x in (documents.begins, documents.ends, documents.hashes))
    changed = 0 if end is None else -1
    begins[changed] = begins[changed] if begin is None else begin
    ends[changed] = ends[changed] if end is None else end
    offsets = (x[changed] - documents.begins[part][changed] for x in (begins, ends))
    content = np.array([hashes[changed], *offsets], np.uint64)
    digest = next(document_hashes([(content.view("<u4"), [len(content) * 2])]))
    hashes[changed] = np.frombuffer(digest, "<u8")[0]
    return Selection(documents.store, begins, ends, hashes)


def exclude_validation(training: Sequence[Selection], validation: Sequence[Selection]) -> list[Selection]:
    """The training documents without those that are also validation documents."""
    held_out = np.unique(np.concatenate([part.hashes for part in validation]))
    masks = [is_member(part.hashes, held_out) for part in training]
    return [part.select(~mask) if mask.any() else part for part, mask in zip(training, masks, strict=True)]


def is_member(hashes: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Whether each hash is in the `ascending` array, which is small. np.isin would sort all hashes."""
    place = np.minimum(np.searchsorted(ascending, hashes), len(ascending) - 1)
    return ascending[place] == hashes
