"""Markdown pages as their code blocks and the commands in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)


class Block(NamedTuple):
    language: str
    code: str
    reason: str | None  # why it does not run here
    line: int  # of the page, at which the code begins


def blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    return [
        Block(found["language"], found["code"], found["reason"], text.count("\n", 0, found.start("code")))
        for found in BLOCK.finditer(text)
    ]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def sections(page: Path) -> dict[str, str]:
    """The text under each heading of the second level."""
    _, *parts = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def commands(page: Path) -> list[list[str]]:
    """The commands of the page's ```sh blocks as words, without the variables before them."""
    return [words for block in blocks(page) if block.language == "sh" for words in commands_of(block.code)]


def commands_of(code: str) -> list[list[str]]:
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                found.append(words)
                words = []
    return [[word for place, word in enumerate(words) if not is_variable(words[: place + 1])] for words in found]


def is_variable(words: list[str]) -> bool:
    return all(re.fullmatch(r"[A-Z_]+=\S*", word) for word in words)


def ligermodels_arguments(words: list[str]) -> list[str] | None:
    """What `ligermodels` gets on its command line, also by way of train.py; None for other programs."""
    if words[0] == "ligermodels":
        return words[1:]
    return ["train", *words[words.index("train.py") + 1 :]] if "train.py" in words else None
