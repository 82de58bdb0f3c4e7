"""Data that needs no file: the embedded stories and chats, and random tokens. Must not know rows."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.chat import documents
from ligermodels.training.data.corpus import asked_in_conversation, asked_in_story, conversations, stories
from ligermodels.training.data.records import BadLines, Conversation, Record, Text
from ligermodels.training.data.split import Selection, all_of
from ligermodels.training.data.store import TokenStore, in_memory

RANDOM = "random"
EMBEDDED_VOCABULARY = 1024
STORIES, UNSEEN_STORIES = 24_000, 320
CONVERSATIONS, UNSEEN_CONVERSATIONS = 8_000, 200
RANDOM_ROWS = 256
QUESTIONS = 120  # asked at every validation

Question = tuple[Any, str]  # prompt: the beginning of a text, or messages; answer


class Embedded(NamedTuple):
    """nats: of all predicted tokens of the validation documents, the least that a model can lose on them. questions: on
    these documents, to which there is one answer."""

    training: Selection
    validation: Selection
    nats: float
    questions: list[Question]


def story_data(tokenizer: Tokenizer, end: int, vocab_size: int) -> Embedded:
    unseen = list(stories(seed=1, count=UNSEEN_STORIES))

    def store(texts: Iterable[str], name: str) -> Selection:
        records = (Text(text, f"{name}:{number}") for number, text in enumerate(texts, 1))
        return tokenised(records, tokenizer, end, vocab_size)

    training = store((text for text, _ in stories(seed=0, count=STORIES)), "stories")
    validation = store((text for text, _ in unseen), "unseen stories")
    return Embedded(
        training, validation, math.fsum(n for _, n in unseen), [asked_in_story(text) for text, _ in unseen[:QUESTIONS]]
    )


def chat_data(tokenizer: Tokenizer, end: int, vocab_size: int) -> Embedded:
    """Every answer follows from what was asked."""
    unseen = list(conversations(seed=1, count=UNSEEN_CONVERSATIONS))

    def store(chats: Iterable[Any], name: str) -> Selection:
        records = (Conversation(messages, None, f"{name}:{number}") for number, messages in enumerate(chats, 1))
        return tokenised(records, tokenizer, end, vocab_size)

    training, validation = store(conversations(seed=0, count=CONVERSATIONS), "chats"), store(unseen, "unseen chats")
    return Embedded(training, validation, 0.0, [asked_in_conversation(messages) for messages in unseen[:QUESTIONS]])


def tokenised(records: Iterable[Record], tokenizer: Tokenizer, end: int, vocab_size: int) -> Selection:
    return all_of(in_memory(documents(records, tokenizer, end, BadLines(0)), vocab_size))


EMBEDDED: dict[str, Callable[[Tokenizer, int, int], Embedded]] = {"stories": story_data, "chats": chat_data}


def random_data(vocab_size: int, length: int) -> Embedded:
    """Rows of uniformly random tokens, to measure speed and memory with."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=(RANDOM_ROWS + 1) * length, dtype=np.uint32)
    offsets = np.arange(RANDOM_ROWS + 2) * length
    store = TokenStore(tokens, offsets, np.arange(RANDOM_ROWS + 1, dtype=np.uint64), None, "random")
    rows, last = all_of(store), np.arange(RANDOM_ROWS + 1) == RANDOM_ROWS
    validation = rows.where(last)
    return Embedded(rows.where(~last), validation, validation.supervised * math.log(vocab_size), [])
