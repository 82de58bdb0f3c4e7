"""The layout of groups in one packed row, in which the completions of a group share one copy of its prompt.

    [prompt without its last token] [last prompt token, completion 1] [last prompt token, completion 2] …

Each bracket is a packed document. A completion's document has the first one as its prefix: its positions go on from
there, and it reads the keys of the prefix before its own (`SharedKeys`). The last prompt token is repeated, so that
each completion's first token is predicted within its own document. Results equal those of separate sequences, a prompt
with a completion each. A group with one completion, or with nothing to share, is laid out as separate sequences; so is
one whose prompt ends with an image, of which the last token would be repeated.
Must not know devices or models.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ligermodels.layers.decoder import IGNORE_INDEX
from ligermodels.training.data.preferences.groups import Group, GroupImage


class GroupPiece(NamedTuple):
    """The completions of a group that one row has, from side number `first` on. unit: the group's number in the step.

    number: of its first completion among all of the data; -1 for completions that are not from the data.
    """

    group: Group
    unit: int
    first: int = 0
    number: int = -1

    def tokens(self, share: bool) -> int:
        """The number of tokens in a row."""
        prompt, lengths = len(self.group.prompt), self.group.lengths
        if shares(self.group, share):
            return prompt - 1 + sum(lengths) + len(lengths)
        return prompt * len(lengths) + sum(lengths)


class RowDocument(NamedTuple):
    """position: of its first token. prefix: the document whose keys it reads before its own. context: how many tokens
    come before the completion; of a prefix, all. images: in the order of their tokens."""

    ids: np.ndarray
    position: int
    prefix: int | None
    context: int
    supervised: np.ndarray | None
    images: tuple[GroupImage, ...] = ()


class RowLayout(NamedTuple):
    """A row of T tokens with D documents, of which S have a completion; arrays as in `PreferenceBatch`.

    offsets [T + 1] and places [K] are those of `SharedKeys`, cu_seqlens_k [D + 1] its cu_seqlens. prefixes: the number
    of each document's prefix. images: of all documents, in the order of their tokens.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    rows: np.ndarray
    completions: np.ndarray
    last_tokens: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    cu_seqlens_k: np.ndarray
    shares: bool
    prefixes: list[int | None]
    images: list[GroupImage]


def shares(group: Group, share: bool) -> bool:
    ends_with_image = any(image.stop == len(group.prompt) for image in group.images_of(0))
    return share and len(group.completions) > 1 and len(group.prompt) > 1 and not ends_with_image


def split_group(piece: GroupPiece, length: int, share: bool) -> list[GroupPiece]:
    """A group as pieces of at most `length` tokens, with a prompt each; a completion that is longer has its own.

    For losses that read each completion alone, such as those of sampled completions.
    """
    if piece.tokens(share) <= length:
        return [piece]
    pieces: list[GroupPiece] = []
    begin = 0
    for end in range(1, len(piece.group.completions) + 1):
        if end - begin > 1 and part(piece, begin, end).tokens(share) > length:
            pieces.append(part(piece, begin, end - 1))
            begin = end - 1
    return [*pieces, part(piece, begin, len(piece.group.completions))]


def part(piece: GroupPiece, begin: int, end: int) -> GroupPiece:
    number = piece.number if piece.number < 0 else piece.number + begin
    return GroupPiece(piece.group.select(begin, end), piece.unit, piece.first + begin, number)


def lay_out(pieces: Sequence[GroupPiece], share: bool, multiple: int) -> RowLayout:
    """The row of some pieces, padded to a multiple of tokens; the padding is a document of its own."""
    documents = row_documents(pieces, share)
    padding = -sum(len(document.ids) for document in documents) % multiple
    if padding or not documents:
        documents.append(RowDocument(np.zeros(padding or multiple, np.int64), 0, None, padding or multiple, None))
    sizes = [len(document.ids) for document in documents]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    ids = np.concatenate([document.ids for document in documents]).astype(np.int64)
    positions = np.concatenate([np.arange(d.position, d.position + len(d.ids)) for d in documents])

    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    rows, counts, last_tokens = [], [], []
    for document, begin, end in zip(documents, begins.tolist(), ends.tolist(), strict=True):
        if document.context < len(document.ids):
            places = np.arange(begin + document.context, end)
            places = places if document.supervised is None else places[document.supervised]
            labels[places] = ids[places]
            rows.append(places - 1)
            counts.append(len(places))
            last_tokens.append(end - 1)

    prefixes = [
        np.arange(begins[d.prefix], ends[d.prefix]) if d.prefix is not None else np.arange(0) for d in documents
    ]
    own = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    keys = np.concatenate([part for pair in zip(prefixes, own, strict=True) for part in pair])  # token of each key
    key_sizes = [len(prefix) + size for prefix, size in zip(prefixes, sizes, strict=True)]
    return RowLayout(
        ids, labels, positions, cumulated(sizes), np.concatenate([*rows, np.arange(0)]), cumulated(counts),
        np.array(last_tokens, np.int64), cumulated(np.bincount(keys, minlength=len(ids))),
        np.argsort(keys, kind="stable").astype(np.int32), cumulated(key_sizes), any(map(len, prefixes)),
        [document.prefix for document in documents], [image for document in documents for image in document.images],
    )  # fmt: skip


def row_documents(pieces: Sequence[GroupPiece], share: bool) -> list[RowDocument]:
    documents: list[RowDocument] = []
    for piece in pieces:
        documents += group_documents(piece.group, shares(piece.group, share), len(documents))
    return documents


def group_documents(group: Group, share: bool, number: int) -> Iterator[RowDocument]:
    """number: of documents in the row before this group."""
    prompt = group.prompt
    before, position, prefix, images = prompt, 0, None, group.images_of(0)
    if share:
        yield RowDocument(prompt[:-1], 0, None, len(prompt) - 1, None, images)
        before, position, prefix, images = prompt[-1:], len(prompt) - 1, number, ()
    for part, (completion, mask) in enumerate(zip(group.completions, group.supervised, strict=True), 1):
        ids = np.concatenate([before, completion])
        yield RowDocument(ids, position, prefix, len(before), mask, (*images, *group.images_of(part)))


def cumulated(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Offsets: int32, beginning with 0."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
