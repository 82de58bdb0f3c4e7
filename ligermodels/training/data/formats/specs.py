"""What --data names: NAME or NAME=WEIGHT. sources.py reads files, embedded.py makes what needs none.

Usage errors are told from here before numpy or torch are imported.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ligermodels.errors import InputError
from ligermodels.training.settings.config import TrainConfig
from ligermodels.units import counted

RANDOM = "random"
BUILT_IN_SOURCES = ("stories", "chats", "shapes", "preferences", "sums", RANDOM)  # need no file
TITLES = {name: f"the embedded {name}" for name in BUILT_IN_SOURCES} | {RANDOM: "random tokens"}


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


def parse_sources(config: TrainConfig, data: Sequence[str]) -> tuple[list[SourceSpec], list[float] | None, list[str]]:
    """Returns (sources to train on, their weights or None, names of separate sources for validation)."""
    specs = [parse_spec(text) for text in data]
    return specs, mixture_weights(specs), [unweighted_name(text) for text in config.validation_data or []]


def mixture_weights(specs: Sequence[SourceSpec]) -> list[float] | None:
    """Returns the weights of all sources; None if no source has one. Raises InputError if only some have one."""
    weights = [spec.weight for spec in specs if spec.weight is not None]
    if weights and len(weights) < len(specs):
        name = next(spec.name for spec in specs if spec.weight is None)
        raise InputError(f"--data {name}: has no weight, but other sources do; give each one, such as {name}=0.5")
    return weights or None


def unweighted_name(text: str) -> str:
    spec = parse_spec(text)
    if spec.weight is not None:
        raise InputError(f"--validation-data {text}: a validation source is used as a whole; remove the weight")
    return spec.name


def describe_sources(specs: Sequence[SourceSpec], notes: Sequence[tuple[int, str, str]]) -> str:
    """Returns the sources, with what happened to some of their records.

    notes: (number, noun, what happened) for each kind.
    """
    names = (TITLES.get(spec.name, spec.name) + ("" if spec.weight is None else f"={spec.weight:g}") for spec in specs)
    said = [f"{counted(number, noun)} {happened}" for number, noun, happened in notes if number]
    return " + ".join(names) + (f" ({', '.join(said)})" if said else "")


def missing_data(config: TrainConfig) -> InputError:
    return InputError(
        f"--data is missing: a file, a folder or hub:NAME that {config.title} is trained on; --data {RANDOM} trains on "
        "random tokens, to measure speed and memory"
    )
