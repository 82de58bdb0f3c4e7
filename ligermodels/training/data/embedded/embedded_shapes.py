"""Embedded pictures with questions: one coloured shape on a plain ground, its kind and its colour.

Place, size, ground and shade are drawn at random, so that unseen pictures differ from all seen ones. Pictures are PNG
files in memory. This module knows nothing about tokens or models.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

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


def shape_conversations(seed: int, count: int) -> Iterator[tuple[bytes, list[dict[str, Any]]]]:
    """`count` pictures, each with both questions in random order; the same for a seed on any machine."""
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
    """Questions and answers, as often as words that a tokenizer should know as a whole."""
    answers = [f"It is {colour}." for colour in SHAPE_COLOURS] + [f"It is a {kind}." for kind in SHAPES]
    for _ in range(TEXT_REPETITIONS):
        yield from QUESTIONS.values()
        yield from answers


def draw(kind: str, colour: tuple[int, int, int], random: np.random.Generator) -> bytes:
    """A PNG file of SIDE x SIDE pixels with one shape, wholly within it."""
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
    """A PNG file of pixels uint8 [H, W, 3]."""
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line: no filter
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
