"""Real texts of four kinds, which need no network: prose, code, Chinese, and emoji among words.

Prose is Python's own documentation, code the sources of its standard library, and emoji stand beside their names in
Unicode. The Chinese page, tests/data/real/chinese.txt, was written for these tests.
"""

import argparse
import difflib
import functools
import inspect
import random
import textwrap
import unicodedata
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

CHINESE = Path(__file__).parents[1] / "data/real/chinese.txt"
SOURCES: tuple[ModuleType, ...] = (argparse, difflib, textwrap)
EMOJI = [*range(0x1F300, 0x1F320), *range(0x1F400, 0x1F43F), *range(0x1F600, 0x1F64F), *range(0x1F680, 0x1F6C5)]
SENTENCES = ("Today I saw {0} {1} and thought of {2}.", "{0}{0} {1} means {2}!", "Which is better, {0} or {1}? {2} {0}")
# Scripts, signs and white space of which no two tokenizers of a kind must differ: first and last code point.
RANGES = {
    "latin": (0xA1, 0x24F), "greek and cyrillic": (0x370, 0x4FF), "hebrew and arabic": (0x590, 0x6FF),
    "devanagari": (0x900, 0x97F), "thai": (0xE00, 0xE5B), "marks": (0x300, 0x36F), "signs": (0x2010, 0x2BFF),
    "kana and chinese": (0x3040, 0x9FFF), "hangul": (0xAC00, 0xD7A3), "wide": (0xFF01, 0xFFEE),
    "emoji": (0x1F300, 0x1FAFF), "rare chinese": (0x20000, 0x2A6DF), "controls": (0x01, 0x1F),
    "private": (0xE000, 0xF8FF),
}  # fmt: skip
PIECES = (
    " ",
    "  ",
    "\t",
    "\n",
    "\n\n\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u200d",
    "0",
    "7",
    "1234",
    "3.14",
    "'s",
    "don't",
    "_",
)


@functools.cache
def texts() -> dict[str, str]:
    """One long text of each kind."""
    return {"prose": prose(), "code": code(), "chinese": CHINESE.read_text(encoding="utf-8"), "emoji": emoji()}


def prose() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def code() -> str:
    return "\n".join(inspect.getsource(module) for module in SOURCES)


def emoji() -> str:
    signs = [(chr(point), unicodedata.name(chr(point)).lower()) for point in EMOJI]
    draw = random.Random(0)
    lines = []
    for sign, name in signs * 3:
        other, other_name = draw.choice(signs)
        lines.append(draw.choice(SENTENCES).format(sign, other, f"{name} and {other_name}"))
    return "\n".join(lines)


def varied_lines(count: int, special_tokens: list[str]) -> list[str]:
    """Lines of many kinds, the same in every run: a half of real text, the rest drawn from Unicode, white space,
    numbers and the special tokens of a tokenizer."""
    draw = random.Random(1)
    real = [line for text in texts().values() for line in text.splitlines(keepends=True)]
    return draw.sample(real, count // 2) + [drawn_line(draw, special_tokens) for _ in range(count - count // 2)]


def drawn_line(draw: random.Random, special_tokens: list[str]) -> str:
    parts = []
    for _ in range(draw.randint(1, 12)):
        first, last = draw.choice([*RANGES.values(), (0x20, 0x7E)])
        run = "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 6)))
        parts.append(draw.choice([run, run, draw.choice(PIECES), draw.choice(special_tokens)]))
    return "".join(parts)
