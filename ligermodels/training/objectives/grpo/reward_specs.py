"""What --reward names, each with a weight or without: a function of a file, a reward model, or a built-in function."""

import math
from pathlib import Path
from typing import NamedTuple

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo.built_in_rewards import BUILT_IN_REWARDS, is_built_in
from ligermodels.training.reward_function import REWARD_MODEL

REWARD_KINDS = f"FILE.py:FUNCTION, {REWARD_MODEL}FOLDER of a reward model, or one of {', '.join(BUILT_IN_REWARDS)}"


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
