"""Which documents validate and which train. The choice is fixed: it follows from the documents and the fraction alone,
not from a seed, the number of ranks or the length of a row. Must not know rows.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ligermodels.training.data.store import TokenStore, digests

FRACTION, MOST_TOKENS = 0.01, 2**17
MOST = 10  # times the fraction asked for: how much of the tokens whole documents may be


@dataclass(frozen=True)
class Selection:
    """D documents of a store, at tokens[begin:end]: begins, ends [D] int64. hashes [D] uint64: of their contents."""

    store: TokenStore
    begins: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    def where(self, chosen: np.ndarray) -> "Selection":
        """chosen: [D] bool."""
        return Selection(self.store, self.begins[chosen], self.ends[chosen], self.hashes[chosen])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the documents' contents, and of where they lie."""
        known = hashlib.sha256()
        for array in (self.begins, self.ends, self.hashes):
            known.update(np.ascontiguousarray(array).data)
        return known.hexdigest()

    @property
    def tokens(self) -> int:
        return int((self.ends - self.begins).sum())

    @property
    def supervised(self) -> int:
        """Tokens to be predicted: a document's first never is."""
        if self.store.supervised is None:
            return int(np.maximum(self.ends - self.begins - 1, 0).sum())
        spans = zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        return sum(int(np.count_nonzero(self.store.supervised[begin + 1 : end])) for begin, end in spans)


def usual_fraction(stores: Sequence[TokenStore]) -> float:
    """What is for validation where nobody says how much: no more of large data than takes little time each time."""
    return min(FRACTION, MOST_TOKENS / sum(len(store.tokens) for store in stores))


def all_of(store: TokenStore) -> Selection:
    return Selection(store, store.offsets[:-1], store.offsets[1:], store.hashes)


def hold_out(store: TokenStore, fraction: float) -> tuple[Selection, Selection]:
    """(training, validation). The latter are the documents whose hash is smallest, `fraction` of them and at least one,
    so that copies of a document stay together.

    Where that would be far more of the tokens than the fraction, as of a few long documents, it is their end: the
    document that it begins in is cut.
    """
    whole = all_of(store)
    count = max(1, round(len(store) * fraction))
    chosen = whole.hashes <= np.partition(whole.hashes, count - 1)[count - 1]
    validation = whole.where(chosen)
    if len(store) > 1 and validation.tokens <= MOST * fraction * whole.tokens:
        return whole.where(~chosen), validation
    return cut_off(whole, whole.tokens - max(2, round(whole.tokens * fraction)))


def cut_off(whole: Selection, place: int) -> tuple[Selection, Selection]:
    """What comes before and after tokens[place], which is the last target of the one and context in the other."""
    place = max(place, 0)
    document = int(np.searchsorted(whole.ends, place, side="right"))
    before = renewed(whole, slice(document + 1), None, place + 1)
    return before, renewed(whole, slice(document, None), place, None)


def renewed(whole: Selection, documents: slice, begin: int | None, end: int | None) -> Selection:
    """These documents, of which the first begins or the last ends elsewhere now."""
    begins, ends, hashes = (x[documents].copy() for x in (whole.begins, whole.ends, whole.hashes))
    cut = 0 if end is None else -1
    begins[cut] = begins[cut] if begin is None else begin
    ends[cut] = ends[cut] if end is None else end
    content = np.array([hashes[cut], *(x[cut] - whole.begins[documents][cut] for x in (begins, ends))], np.uint64)
    hashes[cut] = np.frombuffer(next(digests([(content.view("<u4"), [len(content) * 2])])), "<u8")[0]
    return Selection(whole.store, begins, ends, hashes)


def without(training: Sequence[Selection], validation: Sequence[Selection]) -> list[Selection]:
    """The training documents that are not also for validation."""
    held_out = np.unique(np.concatenate([part.hashes for part in validation]))
    left_out = [among(part.hashes, held_out) for part in training]
    return [part.where(~out) if out.any() else part for part, out in zip(training, left_out, strict=True)]


def among(hashes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each is one of the known, which are few and ascending: np.isin would sort them all."""
    place = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return known[place] == hashes
