"""The reward of short answers, of `--reward benchmarks/real_models/brief.py:brief` and of TRL, with one signature."""

import re
from collections.abc import Sequence
from typing import Any

LONGEST = 60  # words, from which on an answer earns nothing


def brief(completions: Sequence[Any], name: Sequence[str], **columns: Any) -> list[float]:
    """From 1 for a short answer that names what was asked about, down to 0 for one of 60 words; 0 without the name."""
    return [score(text_of(completion), wanted) for completion, wanted in zip(completions, name, strict=True)]


def score(text: str, wanted: str) -> float:
    named = re.search(rf"\b{re.escape(wanted)}\b", text, re.IGNORECASE) is not None
    return named * max(0.0, 1 - len(text.split()) / LONGEST)


def text_of(completion: Any) -> str:
    """A completion is a text, or of a conversation a list of one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
