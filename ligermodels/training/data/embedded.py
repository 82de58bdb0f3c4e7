"""Datasets that need no file: the embedded stories, chats, shapes, preferences and sums, and random tokens.

The shapes are pictures with questions: one coloured shape on a plain ground, its kind and its colour. Place, size,
ground and shade are drawn at random, so that unseen pictures differ from all seen ones. Pictures are PNG files in
memory.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ligermodels.training.data.embedded_stories import (
    conversation_question,
    conversations,
    preference_pairs,
    stories,
    story_question,
    sum_questions,
)
from ligermodels.training.data.formats.records import Conversation, GroupRecord, Record, Text
from ligermodels.training.data.rows.packing import Selection, all_documents
from ligermodels.training.data.rows.store import TokenStore

SIDE = 56  # pixels of a picture
SHAPE_COLOURS = {
    "red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (235, 215, 30),
    "purple": (150, 40, 180), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = {"colour": "What colour is the shape?", "kind": "What kind of shape is it?"}
SHADE = 20  # the most that a channel of a colour differs from its value above
TEXT_REPETITIONS = 100
GROUND = (20, 100)  # grey levels of the ground
EMBEDDED_VOCABULARY = 1024
TRAINING_STORIES, VALIDATION_STORIES = 12_000, 320
TRAINING_CHATS, VALIDATION_CHATS = 8_000, 200
TRAINING_SHAPES, VALIDATION_SHAPES = 8_000, 200
TRAINING_PAIRS, VALIDATION_PAIRS = 4_000, 200
TRAINING_SUMS, VALIDATION_SUMS = 8_000, 480
RANDOM_ROWS = 256
VALIDATION_QUESTIONS = 120  # asked at every validation
# (prompt, answer); the prompt is the start of a text, or messages, with their images in them.
Question = tuple[Any, str]


def shape_conversations(seed: int, count: int) -> Iterator[tuple[bytes, list[dict[str, Any]]]]:
    """Yields `count` pictures, each with both questions in random order; the same for a seed on any machine."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        colour, kind = str(random.choice(list(SHAPE_COLOURS))), str(random.choice(SHAPES))
        picture = draw(kind, SHAPE_COLOURS[colour], random)
        answers = {"colour": f"It is {colour}.", "kind": f"It is a {kind}."}
        messages: list[dict[str, Any]] = []
        for topic in random.permutation(list(QUESTIONS)):
            question: Any = QUESTIONS[topic]
            if not messages:
                question = [{"type": "image"}, {"type": "text", "text": question}]
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answers[topic]}]
        yield picture, messages


def shape_texts() -> Iterator[str]:
    """Yields questions and answers, as often as words that a tokenizer should know as a whole."""
    answers = [f"It is {colour}." for colour in SHAPE_COLOURS] + [f"It is a {kind}." for kind in SHAPES]
    for _ in range(TEXT_REPETITIONS):
        yield from QUESTIONS.values()
        yield from answers


def draw(kind: str, colour: tuple[int, int, int], random: np.random.Generator) -> bytes:
    """Returns a PNG file of SIDE x SIDE pixels with one shape, wholly within it."""
    radius = random.integers(3 * SIDE // 10, 9 * SIDE // 20)
    middle = random.integers(radius, SIDE - radius, size=2)
    down, right = np.indices((SIDE, SIDE)) - middle[:, None, None]  # [SIDE, SIDE] each
    inside = {
        "circle": down**2 + right**2 <= radius**2,
        "square": np.maximum(abs(down), abs(right)) <= 0.8 * radius,
        "triangle": (abs(right) <= (down + radius) / 2) & (abs(down) <= radius),
        "cross": (np.minimum(abs(down), abs(right)) <= 0.25 * radius) & (np.maximum(abs(down), abs(right)) <= radius),
    }[kind]
    shade = np.clip(np.array(colour) + random.integers(-SHADE, SHADE + 1, size=3), 0, 255)
    ground = np.full(3, random.integers(*GROUND))
    return png(np.where(inside[..., None], shade, ground).astype(np.uint8))


def png(pixels: np.ndarray) -> bytes:
    """Returns a PNG file of pixels uint8 [H, W, 3]."""
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line: no filter
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )


class EmbeddedSplit(NamedTuple):
    """Determines the records of one side of the split, which are the same on any machine."""

    kind: str
    seed: int
    size: int

    def records(self) -> Iterator[Record]:
        title = f"unseen {self.kind}" if self.seed else self.kind
        items, record = RECORDS[self.kind]
        return (record(item, f"{title}:{number}") for number, item in enumerate(items(self.seed, self.size), 1))


class EmbeddedDataset(NamedTuple):
    """Embedded data with what is known about them.

    nats: the entropy of the validation documents, which is the least loss, summed over all predicted tokens, that a
    model can reach on them. questions: questions about these documents; each has exactly one answer.
    """

    training: EmbeddedSplit
    validation: EmbeddedSplit
    nats: float
    questions: list[Question]


def embedded_dataset(kind: str) -> EmbeddedDataset:
    """One of EMBEDDED. Its entropy is zero but for stories: every other answer follows from its question or picture."""
    training, validation = {
        "stories": (TRAINING_STORIES, VALIDATION_STORIES), "chats": (TRAINING_CHATS, VALIDATION_CHATS),
        "shapes": (TRAINING_SHAPES, VALIDATION_SHAPES),
    }[kind]  # fmt: skip
    items = list(RECORDS[kind][0](1, validation))
    nats = math.fsum(nats for _, nats in items) if kind == "stories" else 0.0
    questions = [EMBEDDED[kind](item) for item in items[:VALIDATION_QUESTIONS]]
    return EmbeddedDataset(EmbeddedSplit(kind, 0, training), EmbeddedSplit(kind, 1, validation), nats, questions)


def shape_question(picture: bytes, messages: list[dict[str, Any]]) -> Question:
    """Returns the first question about a picture, with its one answer."""
    image, text = messages[0]["content"]
    return [messages[0] | {"content": [image | {"image": picture}, text]}], messages[1]["content"]


# What makes the items of each kind, given a seed and their number; and the record of an item, given its place.
RECORDS: dict[str, tuple[Callable[[int, int], Iterator[Any]], Callable[[Any, str], Record]]] = {
    "stories": (stories, lambda story, place: Text(story[0], place)),
    "chats": (conversations, lambda messages, place: Conversation(messages, None, place)),
    "shapes": (shape_conversations, lambda shape, place: Conversation(shape[1], None, place, images=[shape[0]])),
    "preferences": (preference_pairs, lambda pair, place: GroupRecord(pair[0], pair[1:], place)),
    "sums": (sum_questions, lambda asked, place: GroupRecord(asked[0], (), place, columns={"answer": asked[1]})),
}
# The question about an item of supervised training.
EMBEDDED: dict[str, Callable[[Any], Question]] = {
    "stories": lambda story: story_question(story[0]), "chats": conversation_question,
    "shapes": lambda shape: shape_question(*shape),
}  # fmt: skip
# (training, validation) of post-training.
EMBEDDED_GROUPS = {
    "preferences": (
        EmbeddedSplit("preferences", seed=0, size=TRAINING_PAIRS), EmbeddedSplit("preferences", 1, VALIDATION_PAIRS),
    ),
    "sums": (EmbeddedSplit("sums", seed=0, size=TRAINING_SUMS), EmbeddedSplit("sums", 1, VALIDATION_SUMS)),
}  # fmt: skip


def random_tokens(vocab_size: int, length: int) -> tuple[Selection, Selection, float]:
    """Returns rows of uniformly random tokens, to measure speed and memory.

    Returns the training rows, one validation row, and the entropy of the validation row in nats.
    """
    tokens = np.random.default_rng(0).integers(vocab_size, size=(RANDOM_ROWS + 1) * length, dtype=np.uint32)
    offsets = np.arange(RANDOM_ROWS + 2) * length
    store = TokenStore(tokens, offsets, np.arange(RANDOM_ROWS + 1, dtype=np.uint64), None, "random")
    rows, is_last = all_documents(store), np.arange(RANDOM_ROWS + 1) == RANDOM_ROWS
    validation = rows.select(is_last)
    return rows.select(~is_last), validation, validation.supervised * math.log(vocab_size)
