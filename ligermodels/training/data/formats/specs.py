"""What --data names: NAME or NAME=WEIGHT. sources.py reads files, embedded.py makes what needs none.

Usage errors are told from here before numpy or torch are imported.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from ligermodels.errors import InputError
from ligermodels.training.settings.config import TrainConfig

T = TypeVar("T")

RANDOM = "random"
BUILT_IN_SOURCES = ("stories", "chats", "shapes", "preferences", "sums", RANDOM)  # need no file


class SourceSpec(NamedTuple):
    """A source of --data. weight: the share of this source in the mixture; None if no weight was given."""

    name: str
    weight: float | None


def parse_spec(text: str) -> SourceSpec:
    """Parses NAME or NAME=WEIGHT.

    The whole text is the NAME if a file or folder of that name exists, or if no number follows the last "=".
    Raises InputError if the weight is not above 0.
    """
    name, equals, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return SourceSpec(text, None)
    if not equals or Path(text).exists():
        return SourceSpec(text, None)
    if not name or not 0 < weight < math.inf:
        raise InputError(f"--data {text}: must be NAME, or NAME=WEIGHT with a weight above 0, such as my.jsonl=0.7")
    return SourceSpec(name, weight)


def open_validation(name: str, open_source: Callable[[str], T]) -> T:
    """What `open_source` returns for the source `name`. Its InputError names --validation-data as the flag."""
    try:
        return open_source(name)
    except InputError as error:
        raise InputError(str(error).replace(f"--data {name}:", f"--validation-data {name}:", 1)) from error


def missing_data(config: TrainConfig) -> InputError:
    return InputError(
        f"--data is missing: a file, a folder or hub:NAME that {config.title} is trained on; --data {RANDOM} trains on "
        "random tokens, to measure speed and memory"
    )
