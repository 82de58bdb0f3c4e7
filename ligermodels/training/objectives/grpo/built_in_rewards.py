"""Reward functions that come with the package, with the signature of all reward functions.

A function gets lists with one value for each completion, by name, and returns one reward for each.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo.reward_worker import format_reward, text_of

RewardCallable = Callable[..., Any]
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
BUILT_IN_REWARDS = ("exact", "number", "format:REGEX", "length", "length:TOKENS")


def is_built_in(name: str) -> bool:
    """Whether a name is one of `BUILT_IN_REWARDS`, with any argument."""
    kind, colon, _ = name.partition(":")
    return any((kind, bool(colon)) == (known.partition(":")[0], ":" in known) for known in BUILT_IN_REWARDS)


def built_in_reward(name: str, max_completion_length: int) -> RewardCallable:
    """The function of this name. Raises InputError for an argument that it cannot have."""
    kind, colon, argument = name.partition(":")
    if name in ("exact", "number"):
        return exact if name == "exact" else equal_number
    if kind == "format":
        try:
            return format_reward(argument)
        except re.error as error:
            raise InputError(f"--reward {name}: is no regular expression: {error}; correct it") from None
    return length_reward(name, argument if colon else None, max_completion_length)


def exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion is the column `answer`, without surrounding blanks, else 0; None without an answer."""
    return [
        None if expected is None else float(text_of(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def equal_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the column `answer`, else 0.

    None where the answer has no number. A comma separates thousands.
    """
    expected = [last_number(str(value)) for value in answer]
    found = [last_number(text_of(completion)) for completion in completions]
    return [None if want is None else float(have == want) for have, want in zip(found, expected, strict=True)]


def last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def length_reward(name: str, argument: str | None, longest: int) -> RewardCallable:
    """DAPO's soft overlong penalty: 0, and over the last tokens before the limit linearly down to −1.

    argument: the number of these tokens; None for a fifth of `longest`, as in DAPO. Source: arXiv 2503.14476, eq. 13.
    """
    tokens = int(argument) if argument is not None and argument.isdecimal() else 0
    tokens = max(1, longest // 5) if argument is None else tokens
    if not 0 < tokens <= longest:
        raise InputError(f"--reward {name}: must be length:TOKENS with 1 to {longest} (--max-completion-length) tokens")

    def length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [min(0.0, (longest - tokens - len(ids)) / tokens) for ids in completion_ids]

    return length
