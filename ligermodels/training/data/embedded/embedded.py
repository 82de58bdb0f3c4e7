"""Datasets that need no file: the embedded stories, chats, shapes, preferences and sums, and random tokens.

This module knows nothing about rows of fixed length.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ligermodels.training.data.embedded.embedded_preferences import preference_pairs, sum_questions
from ligermodels.training.data.embedded.embedded_shapes import shape_conversations
from ligermodels.training.data.embedded.embedded_stories import (
    conversation_question,
    conversations,
    stories,
    story_question,
)
from ligermodels.training.data.formats.records import Conversation, GroupRecord, Record, Text
from ligermodels.training.data.rows.split import Selection, all_documents
from ligermodels.training.data.rows.store import TokenStore

EMBEDDED_VOCABULARY = 1024
TRAINING_STORIES, VALIDATION_STORIES = 24_000, 320
TRAINING_CHATS, VALIDATION_CHATS = 8_000, 200
TRAINING_SHAPES, VALIDATION_SHAPES = 8_000, 200
TRAINING_PAIRS, VALIDATION_PAIRS = 4_000, 200
TRAINING_SUMS, VALIDATION_SUMS = 8_000, 480
RANDOM_ROWS = 256
VALIDATION_QUESTIONS = 120  # asked at every validation

# (prompt, answer); the prompt is the start of a text, or messages, with their images in them.
Question = tuple[Any, str]


class EmbeddedSplit(NamedTuple):
    """Everything that determines the records of one side of the split; the same on any machine."""

    kind: str
    seed: int
    size: int

    def records(self) -> Iterator[Record]:
        title = f"unseen {self.kind}" if self.seed else self.kind
        return RECORDS[self.kind](self.seed, self.size, title)


class EmbeddedDataset(NamedTuple):
    """nats: the entropy of the validation documents, which is the least loss, summed over all predicted tokens, that a
    model can reach on them. questions: on these documents; each has exactly one answer."""

    training: EmbeddedSplit
    validation: EmbeddedSplit
    nats: float
    questions: list[Question]


def story_records(seed: int, count: int, title: str) -> Iterator[Text]:
    return (Text(text, f"{title}:{number}") for number, (text, _) in enumerate(stories(seed, count), 1))


def chat_records(seed: int, count: int, title: str) -> Iterator[Conversation]:
    chats = enumerate(conversations(seed, count), 1)
    return (Conversation(messages, None, f"{title}:{number}") for number, messages in chats)


def story_dataset() -> EmbeddedDataset:
    training = EmbeddedSplit("stories", seed=0, size=TRAINING_STORIES)
    validation = EmbeddedSplit("stories", seed=1, size=VALIDATION_STORIES)
    texts = list(stories(validation.seed, validation.size))
    questions = [story_question(text) for text, _ in texts[:VALIDATION_QUESTIONS]]
    return EmbeddedDataset(training, validation, math.fsum(nats for _, nats in texts), questions)


def chat_dataset() -> EmbeddedDataset:
    """Its entropy is zero: every answer follows from its question."""
    training = EmbeddedSplit("chats", seed=0, size=TRAINING_CHATS)
    validation = EmbeddedSplit("chats", seed=1, size=VALIDATION_CHATS)
    chats = conversations(validation.seed, min(validation.size, VALIDATION_QUESTIONS))
    return EmbeddedDataset(training, validation, 0.0, [conversation_question(messages) for messages in chats])


def shape_records(seed: int, count: int, title: str) -> Iterator[Conversation]:
    for number, (picture, messages) in enumerate(shape_conversations(seed, count), 1):
        yield Conversation(messages, None, f"{title}:{number}", images=[picture])


def shape_dataset() -> EmbeddedDataset:
    """Its entropy is zero: every answer follows from the picture."""
    training = EmbeddedSplit("shapes", seed=0, size=TRAINING_SHAPES)
    validation = EmbeddedSplit("shapes", seed=1, size=VALIDATION_SHAPES)
    shapes = shape_conversations(validation.seed, min(validation.size, VALIDATION_QUESTIONS))
    return EmbeddedDataset(training, validation, 0.0, [shape_question(*shape) for shape in shapes])


def shape_question(picture: bytes, messages: list[dict[str, Any]]) -> Question:
    """The first question about a picture, with its one answer."""
    image, text = messages[0]["content"]
    return [messages[0] | {"content": [image | {"image": picture}, text]}], messages[1]["content"]


def pair_records(seed: int, count: int, title: str) -> Iterator[GroupRecord]:
    for number, (prompt, chosen, rejected) in enumerate(preference_pairs(seed, count), 1):
        yield GroupRecord(prompt, (chosen, rejected), f"{title}:{number}")


def sum_records(seed: int, count: int, title: str) -> Iterator[GroupRecord]:
    for number, (prompt, answer) in enumerate(sum_questions(seed, count), 1):
        yield GroupRecord(prompt, (), f"{title}:{number}", columns={"answer": answer})


RECORDS: dict[str, Callable[[int, int, str], Iterator[Record]]] = {
    "stories": story_records, "chats": chat_records, "shapes": shape_records, "preferences": pair_records,
    "sums": sum_records,
}  # fmt: skip
EMBEDDED = {"stories": story_dataset, "chats": chat_dataset, "shapes": shape_dataset}
# (training, validation) of post-training.
EMBEDDED_GROUPS = {
    "preferences": (
        EmbeddedSplit("preferences", seed=0, size=TRAINING_PAIRS), EmbeddedSplit("preferences", 1, VALIDATION_PAIRS),
    ),
    "sums": (EmbeddedSplit("sums", seed=0, size=TRAINING_SUMS), EmbeddedSplit("sums", 1, VALIDATION_SUMS)),
}  # fmt: skip


def random_tokens(vocab_size: int, length: int) -> tuple[Selection, Selection, float]:
    """Rows of uniformly random tokens, to measure speed and memory.

    Returns the training rows, one validation row, and the entropy of the validation row in nats.
    """
    tokens = np.random.default_rng(0).integers(vocab_size, size=(RANDOM_ROWS + 1) * length, dtype=np.uint32)
    offsets = np.arange(RANDOM_ROWS + 2) * length
    store = TokenStore(tokens, offsets, np.arange(RANDOM_ROWS + 1, dtype=np.uint64), None, "random")
    rows, is_last = all_documents(store), np.arange(RANDOM_ROWS + 1) == RANDOM_ROWS
    validation = rows.select(is_last)
    return rows.select(~is_last), validation, validation.supervised * math.log(vocab_size)
