"""From documents to the rows of tokens that a step trains on.

Documents are packed whole into rows of one length (T tokens), the longest first, each where it fits best; one longer
than a row is cut into pieces that overlap by one token. A piece's first token is context and is never predicted, nor is
padding: every other token of every document is a target exactly once. Rows come in an order that only the seed decides,
not the number of ranks. Must not know the model.
"""

import bisect
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.corpus import stories, vocabulary_texts
from ligermodels.training.parallel import World
from ligermodels.training.tokens import END_OF_TEXT_ID, load_tokenizer, train_tokenizer

IGNORED = -100
CORPUS_VOCABULARY = 1024
TRAINING_STORIES, VALIDATION_STORIES = 24_000, 320
SYNTHETIC_ROWS = 256


@dataclass(frozen=True)
class Rows:
    """R rows of T tokens: input_ids [R, T] int32, labels [R, T] int32 at the same positions, -100 where none is due."""

    input_ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def take(self, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """input_ids and labels [len(indices), T] int64 on `device`; rows past the end have nothing to predict."""
        missing = indices >= len(self)
        indices = indices.clamp_max(len(self) - 1)
        labels = self.labels[indices].masked_fill(missing[:, None], IGNORED)
        return self.input_ids[indices].long().to(device), labels.long().to(device)


@dataclass(frozen=True)
class Data:
    """What a run trains on and validates with.

    new_tokenizer: the one trained on these documents, where the model brought none. floor: their entropy in nats per
    predicted token, where it is known. prompt: the beginning of an unseen document.
    """

    description: str
    training: Rows
    validation: Rows
    new_tokenizer: Tokenizer | None = None
    floor: float | None = None
    prompt: str | None = None


def corpus(length: int) -> Data:
    """The embedded stories and a tokenizer trained on them; no validation story is a training story."""
    texts = [text for text, _ in stories(seed=0, count=TRAINING_STORIES)]
    known = set(texts)
    unseen = [story for story in stories(seed=1, count=VALIDATION_STORIES) if story[0] not in known]
    tokenizer = train_tokenizer(vocabulary_texts(), CORPUS_VOCABULARY)
    training = pack(encode(tokenizer, texts, END_OF_TEXT_ID), length, END_OF_TEXT_ID)
    validation = pack(encode(tokenizer, [text for text, _ in unseen], END_OF_TEXT_ID), length, END_OF_TEXT_ID)
    floor = sum(nats for _, nats in unseen) / int(supervised(validation.labels))
    prompt = unseen[0][0].partition("=")[0] + "="
    return Data("the embedded stories", training, validation, tokenizer, floor, prompt)


def text_file(path: str, folder: Path | None, vocab_size: int, length: int) -> Data:
    """A .txt file (one document) or .jsonl file (one a line, in its field text); every hundredth row is for validation.

    folder: the model's, whose tokenizer is used; None trains one of `vocab_size` entries on the file.
    Raises InputError naming file and line.
    """
    texts = list(read_documents(Path(path)))
    tokenizer, end = load_tokenizer(folder) if folder else (train_tokenizer(texts, vocab_size), END_OF_TEXT_ID)
    rows = pack(encode(tokenizer, texts, end), length, end)
    if len(rows) < 2:
        raise InputError(f"{path}: fills {len(rows)} row of {length} tokens; 2 are needed: lower --sequence-length")
    largest = int(rows.input_ids.max())
    if largest >= vocab_size:
        raise InputError(
            f"{path}: token id {largest} is outside the model's vocabulary of {vocab_size}: check tokenizer.json"
        )
    order = permutation(len(rows), 0, 0)
    held_out = max(1, len(rows) // 100)
    validation, training = (Rows(rows.input_ids[i], rows.labels[i]) for i in (order[:held_out], order[held_out:]))
    return Data(path, training, validation, None if folder else tokenizer)


def synthetic(vocab_size: int, length: int) -> Data:
    """Uniformly random tokens, to measure speed and memory with; no model can do better than ln(vocab_size)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (SYNTHETIC_ROWS, length), generator=generator, dtype=torch.int32)
    return Data("random tokens", Rows(tokens[1:], tokens[1:]), Rows(tokens[:1], tokens[:1]), floor=math.log(vocab_size))


def read_documents(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield document_of(line, f"{path}:{number}")


def document_of(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}:{error.colno}: not JSON: {error.msg}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise InputError(f'{place}: needs a field text, as in {{"text": "…"}}')
    return record["text"]


def encode(tokenizer: Tokenizer, texts: list[str], end: int) -> list[list[int]]:
    """Token ids of each non-empty text: begun as the tokenizer begins one, and ended by `end`."""
    return [[*ids, end] for ids in tokenizer.encode_batch([text for text in texts if text])]


def pack(documents: list[list[int]], length: int, padding: int) -> Rows:
    """Best fit, longest first; within a row pieces keep that order."""
    pieces = [piece for document in documents for piece in cut(document, length)]
    pieces.sort(key=len, reverse=True)
    rows: list[list[list[int]]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), ascending; only those with room for the shortest piece
    for piece in pieces:
        fit = bisect.bisect_left(open_rows, (len(piece), 0))
        room, row = open_rows.pop(fit) if fit < len(open_rows) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        if room - len(piece) >= len(pieces[-1]):
            bisect.insort(open_rows, (room - len(piece), row))
    input_ids = torch.full((len(rows), length), padding, dtype=torch.int32)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.int32)
    for index, packed in enumerate(rows):
        tokens = [token for piece in packed for token in piece]
        targets = [target for piece in packed for target in (IGNORED, *piece[1:])]
        input_ids[index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        labels[index, : len(tokens)] = torch.tensor(targets, dtype=torch.int32)
    return Rows(input_ids, labels)


def cut(document: list[int], length: int) -> Iterator[list[int]]:
    """Pieces of at most `length` tokens, each beginning with the token that ended the one before."""
    for start in range(0, max(1, len(document) - 1), length - 1):
        yield document[start : start + length]


def supervised(labels: Tensor) -> Tensor:
    """How many tokens of labels [B, T] are predicted: a row's first never is, as nothing comes before it."""
    return (labels[:, 1:] != IGNORED).sum()


@functools.lru_cache(maxsize=2)
def permutation(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


def shuffled(count: int, seed: int, start: int, stop: int) -> Tensor:
    """Entries [start, stop) of an endless sequence of row indices: one permutation of `count` after another."""
    epochs = range(start // count, (stop - 1) // count + 1)
    sequence = torch.cat([permutation(count, seed, epoch) for epoch in epochs])
    return sequence[start - epochs[0] * count : stop - epochs[0] * count]


def micro_batches(
    rows: Rows, seed: int, step: int, accumulate: int, batch_size: int, world: World
) -> list[tuple[Tensor, Tensor]]:
    """This rank's `accumulate` pairs (input_ids, labels) [batch_size, T] of a step.

    Which rows a step has, over all ranks and micro-batches, depends on their number only: two ranks see what one sees
    with twice the accumulation.
    """
    per_step = accumulate * world.size * batch_size
    indices = shuffled(len(rows), seed, step * per_step, (step + 1) * per_step)
    return [rows.take(mine, world.device) for mine in indices.view(accumulate, world.size, batch_size)[:, world.rank]]


def validation_batches(rows: Rows, batch_size: int, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Every row once over all ranks, equally many batches on each: the last are filled up with rows of no labels."""
    for start in range(0, len(rows), world.size * batch_size):
        yield rows.take(start + world.rank * batch_size + torch.arange(batch_size), world.device)
