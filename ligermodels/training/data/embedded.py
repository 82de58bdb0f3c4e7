"""Data that needs no file: the embedded stories and chats, and random tokens. Must not know rows."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ligermodels.training.data.corpus import asked_in_conversation, asked_in_story, conversations, stories
from ligermodels.training.data.records import Conversation, Record, Text
from ligermodels.training.data.split import Selection, all_of
from ligermodels.training.data.store import TokenStore

RANDOM = "random"
EMBEDDED_VOCABULARY = 1024
STORIES, UNSEEN_STORIES = 24_000, 320
CONVERSATIONS, UNSEEN_CONVERSATIONS = 8_000, 200
RANDOM_ROWS = 256
QUESTIONS = 120  # asked at every validation

Question = tuple[Any, str]  # prompt: the beginning of a text, or messages; answer


class Part(NamedTuple):
    """What records follow from, the same everywhere."""

    kind: str
    seed: int
    size: int

    def records(self) -> Iterator[Record]:
        title = f"unseen {self.kind}" if self.seed else self.kind
        return RECORDS[self.kind](self.seed, self.size, title)


class Embedded(NamedTuple):
    """nats: of all predicted tokens of the validation documents, the least that a model can lose on them. questions: on
    these documents, to which there is one answer."""

    training: Part
    validation: Part
    nats: float
    questions: list[Question]


def story_records(seed: int, count: int, title: str) -> Iterator[Text]:
    return (Text(text, f"{title}:{number}") for number, (text, _) in enumerate(stories(seed, count), 1))


def chat_records(seed: int, count: int, title: str) -> Iterator[Conversation]:
    chats = enumerate(conversations(seed, count), 1)
    return (Conversation(messages, None, f"{title}:{number}") for number, messages in chats)


def story_data() -> Embedded:
    unseen = Part("stories", seed=1, size=UNSEEN_STORIES)
    told = list(stories(unseen.seed, unseen.size))
    questions = [asked_in_story(text) for text, _ in told[:QUESTIONS]]
    return Embedded(Part("stories", seed=0, size=STORIES), unseen, math.fsum(nats for _, nats in told), questions)


def chat_data() -> Embedded:
    """Every answer follows from what was asked."""
    unseen = Part("chats", seed=1, size=UNSEEN_CONVERSATIONS)
    said = conversations(unseen.seed, min(unseen.size, QUESTIONS))
    questions = [asked_in_conversation(messages) for messages in said]
    return Embedded(Part("chats", seed=0, size=CONVERSATIONS), unseen, 0.0, questions)


RECORDS: dict[str, Callable[[int, int, str], Iterator[Record]]] = {"stories": story_records, "chats": chat_records}
EMBEDDED = {"stories": story_data, "chats": chat_data}


def random_data(vocab_size: int, length: int) -> tuple[Selection, Selection, float]:
    """Rows of uniformly random tokens, to measure speed and memory with: for training, for validation; its nats."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=(RANDOM_ROWS + 1) * length, dtype=np.uint32)
    offsets = np.arange(RANDOM_ROWS + 2) * length
    store = TokenStore(tokens, offsets, np.arange(RANDOM_ROWS + 1, dtype=np.uint64), None, "random")
    rows, last = all_of(store), np.arange(RANDOM_ROWS + 1) == RANDOM_ROWS
    validation = rows.where(last)
    return rows.where(~last), validation, validation.supervised * math.log(vocab_size)
