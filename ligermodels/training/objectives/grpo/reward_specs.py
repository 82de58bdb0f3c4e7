"""What --reward names, each with a weight or without: a function of a file, a reward model, or a built-in function.

Built-in functions have the signature of all: they get lists with one value for each completion, by name, and return one
reward for each.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo.reward_worker import format_reward, text_of
from ligermodels.training.reward_function import REWARD_MODEL
from ligermodels.units import is_whole_number

RewardCallable = Callable[..., Any]
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
BUILT_IN_REWARDS = ("exact", "number", "format:REGEX", "length", "length:TOKENS")
REWARD_KINDS = f"FILE.py:FUNCTION, {REWARD_MODEL}FOLDER of a reward model, or one of {', '.join(BUILT_IN_REWARDS)}"


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
        except (re.error, OverflowError, RecursionError) as error:  # the latter of large repetitions, of deep groups
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
    tokens = int(argument) if argument is not None and is_whole_number(argument) else 0
    tokens = max(1, longest // 5) if argument is None else tokens
    if not 0 < tokens <= longest:
        raise InputError(f"--reward {name}: must be length:TOKENS with 1 to {longest} (--max-completion-length) tokens")

    def length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [min(0.0, (longest - tokens - len(ids)) / tokens) for ids in completion_ids]

    return length


class RewardSpec(NamedTuple):
    """text is as it was given, without the weight. A spec has a file with a function, a model, or else is built in.

    model: a folder or a name of the Hub.
    """

    text: str
    weight: float
    model: str | None = None
    file: Path | None = None
    function: str = ""


def parse_reward(text: str) -> RewardSpec:
    """Reads FILE.py:FUNCTION, model:FOLDER or the name of a built-in function, with =WEIGHT or without.

    Nothing else decides what is read or run: whoever allows a reward and whoever opens it read it here. Raises
    InputError.
    """
    spec, weight = split_weight(text)
    if is_built_in(spec):
        return RewardSpec(spec, weight)
    if spec.startswith(REWARD_MODEL):
        return RewardSpec(spec, weight, model=spec.removeprefix(REWARD_MODEL))
    path, colon, function = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise InputError(f"--reward {spec}: must be {REWARD_KINDS}")
    return RewardSpec(spec, weight, file=Path(path), function=function)


def split_weight(text: str) -> tuple[str, float]:
    """A spec and its weight, which follows the last "=" if that is a number; 1 without one."""
    spec, equals, weight = text.rpartition("=")
    try:
        value = float(weight) if equals else math.nan
    except ValueError:
        return text, 1.0
    if not equals:
        return text, 1.0
    if not math.isfinite(value):
        raise InputError(f"--reward {text}: the weight is {weight}; must be a finite number")
    return spec, value
