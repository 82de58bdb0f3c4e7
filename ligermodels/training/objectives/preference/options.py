"""Values of flags that name losses: `sigmoid sft=0.2`, `alpha_divergence:0.5`. Must not know what they do."""

from collections.abc import Sequence
from typing import Any

from ligermodels.errors import InputError


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None: the others have the defaults of the function that they are for."""
    return {name: value for name, value in options.items() if value is not None}


def parse_losses(words: Sequence[str]) -> tuple[list[str], list[float]]:
    """Names and weights of `NAME` and `NAME=WEIGHT`; 1 without a weight. Raises InputError."""
    names, weights = [], []
    for word in words:
        name, equals, weight = word.partition("=")
        if name in names:
            raise InputError(f"--loss {' '.join(words)}: names {name} twice; leave one out")
        names.append(name)
        weights.append(number_in(f"--loss {word}", weight, f"a weight, as {name}=0.2") if equals else 1.0)
    return names, weights


def parse_f_divergence(text: str | None) -> tuple[str | None, float | None]:
    """(name, alpha) of `NAME` or `alpha_divergence:ALPHA`. Raises InputError."""
    name, colon, alpha = (text or "").partition(":")
    if colon and name != "alpha_divergence":
        raise InputError(f"--f-divergence {text}: only alpha_divergence has a number")
    return name or None, number_in(f"--f-divergence {text}", alpha, "a number, as :0.5") if colon else None


def number_in(flag: str, text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{flag}: must have {rule}") from None
