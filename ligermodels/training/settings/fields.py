"""How a setting of a run is declared: a dataclass field with its group, rule, help, and the objectives it is for."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ligermodels.training.settings.values import Constraint

SUPERVISED = ("sft", "distill")  # what is trained on rows of text
DISTILL_ALONE, REWARD_ALONE = ("distill",), ("reward",)
PAIR_POLICIES = ("dpo", "orpo", "cpo", "simpo")
ON_PAIRS = (*PAIR_POLICIES, *REWARD_ALONE)
ON_EXAMPLES = ("kto",)  # on judged completions
RL = ("grpo",)  # on completions that are sampled during training
OBJECTIVE_NAMES = (*SUPERVISED, *ON_PAIRS, *ON_EXAMPLES, *RL)
ON_GROUPS = (*ON_PAIRS, *ON_EXAMPLES)  # on groups: a prompt with its completions
WITH_IMAGES = ("sft", *ON_GROUPS)
DPO_ALONE, SIMPO_ALONE, WITH_REFERENCE = ("dpo",), ("simpo",), ("dpo", "kto", *RL)
UNIT_SETTINGS = {  # the setting that says how many units a step takes
    **dict.fromkeys(SUPERVISED, "batch_size"), **dict.fromkeys(ON_PAIRS, "pairs"),
    **dict.fromkeys(ON_EXAMPLES, "examples"), **dict.fromkeys(RL, "prompts"),
}  # fmt: skip

T = TypeVar("T")
KeptType = TypeVar("KeptType", covariant=True)
AcceptedType = TypeVar("AcceptedType", contravariant=True)


class Given(Generic[KeptType, AcceptedType]):
    """The type of a field that takes more types than it keeps: `TrainConfig(output="runs/x").output` is a Path. To type
    checkers a descriptor, whose methods say both; none exists at run time."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: object) -> KeptType: ...

        def __set__(self, instance: object, value: AcceptedType) -> None: ...


OptionalPath = Given[Path | None, str | Path | None]
Values = Given[tuple[T, ...], T | Sequence[T]]
OptionalValues = Given[tuple[T, ...] | None, T | Sequence[T] | None]
Named = Literal["data", "model", "reference", "reward", "template", "folder", "repository"]


def setting(
    group: str,
    default: Any,
    help: str,
    rule: Constraint | None = None,
    *,
    metavar: str | None = None,
    shown: str | None = None,
    may_be_empty: bool = False,
    objectives: Sequence[str] = OBJECTIVE_NAMES,
    names: Named | None = None,
    built_in: Collection[str] = (),
) -> Any:
    """A field of TrainConfig.

    group: the heading of its flag in `--help`. help: one phrase. metavar: the flag's value in the usage. shown: the
    default as help states it, where the field's own is None or depends on other settings. may_be_empty: whether a list
    without a value may be given; where the default is one it may. objectives: those under which the field has an
    effect; under others it is refused. names: the kind of what its texts name outside of the settings: files, models,
    code, repositories; None where they name nothing there. built_in: texts that name a part of this package instead.
    """
    metadata = {
        "group": group, "help": help, "rule": rule, "metavar": metavar, "shown": shown,
        "may_be_empty": may_be_empty or default == (), "objectives": tuple(objectives),
        "names": names, "built_in": tuple(built_in),
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def help_text(field: dataclasses.Field) -> str:
    """What a field is, and its default."""
    default = field.metadata["shown"] or field.default
    if default is None or default is False or default == ():
        return field.metadata["help"]
    shown = "on" if default is True else " ".join(default) if isinstance(default, tuple) else default
    return f"{field.metadata['help']} (default: {shown})"
