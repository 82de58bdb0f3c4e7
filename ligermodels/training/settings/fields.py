"""How a setting of a run is declared: a dataclass field with its group, rule, help, and the objectives it is for; and
how its values are read, from Python and from text."""

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from ligermodels.aliases import TRAIN_ALIASES, alias_hint
from ligermodels.errors import InputError, suggest_closest
from ligermodels.units import is_whole_number

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


class Constraint(NamedTuple):
    """What a value must be, beyond its type: a predicate, and the same in words."""

    holds: Callable[[Any], bool]
    words: str


MOST_BITS = 64  # of a whole number
POSITIVE = Constraint(lambda x: x >= 1, "a whole number above zero")
COUNT = Constraint(lambda x: x >= 0, "a whole number, 0 or more")
LENGTH = Constraint(lambda x: 2 <= x < 2**31, "a whole number above 1 and below 2^31")  # positions are int32
SEED = Constraint(lambda x: 0 <= x < 2**62, "a whole number, 0 or more and below 2^62")  # torch's seeds have 64 bits
ABOVE_ZERO = Constraint(lambda x: 0 < x < math.inf, "a number above 0")
FROM_A_MILLISECOND = Constraint(lambda x: 0.001 <= x < math.inf, "a number of at least 0.001")
NOT_NEGATIVE = Constraint(lambda x: 0 <= x < math.inf, "a number, 0 or more")
NORM = Constraint(lambda x: x > 0, "a number above 0, or inf for none")
FRACTION = Constraint(lambda x: 0 < x < 1, "a number between 0 and 1")
BELOW_HALF = Constraint(lambda x: 0 <= x < 0.5, "a number from 0 to below 0.5")
FROM_0_TO_1 = Constraint(lambda x: 0 <= x <= 1, "a number from 0 to 1")
FINITE = Constraint(math.isfinite, "a finite number")
POSITIVE_FRACTION = Constraint(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
IMAGE_TOKENS = Constraint(
    lambda x: token_range(x) is not None, "the most tokens of an image, or fewest:most as 64:1024"
)
BELOW_ONE = Constraint(lambda x: 0 <= x < 1, "a number from 0 to below 1")


def token_range(text: str) -> tuple[int, int] | None:
    """(fewest, most) of "64:1024"; of "1024" the fewest are 1. None for another text."""
    fewest, colon, most = text.rpartition(":")
    if not most.isdecimal() or not (fewest.isdecimal() or not colon):
        return None
    found = int(fewest or 1), int(most)
    return found if 1 <= found[0] <= found[1] else None


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values of a Literal; empty for any other type."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def checked_value(field: dataclasses.Field, kind: Any, several: bool, value: Any) -> Any:
    """`value` in the type of the field, lists as tuples. kind, several: see `config.type_of`. Raises InputError."""
    if value is None and field.default is None:
        return None
    if not several:
        return checked_item(field, kind, value)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or (not values and not field.metadata["may_be_empty"]):
        raise InputError(f"{field.name} is {value!r}; must be a list of at least one value")
    return tuple(checked_item(field, kind, item) for item in values)


def checked_item(field: dataclasses.Field, kind: Any, value: Any) -> Any:
    rule, choices = field.metadata["rule"], choices_of(kind)
    if isinstance(value, int) and value.bit_length() > MOST_BITS:  # Python may not print it, nor make it a float
        raise InputError(f"{field.name} is a number of {value.bit_length():,} bits; must have at most {MOST_BITS}")
    if choices:
        if value not in choices:
            raise InputError(f"{field.name} {not_a_choice(value, choices)}")
        return value
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is str and isinstance(value, Path):  # a folder of a model or of data
        return str(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InputError(f"{field.name} is {value!r}; must be {words_of(kind, rule)}")
    if rule is not None and not rule.holds(value):
        raise InputError(f"{field.name} is {value!r}; must be {rule.words}")
    return value


def parsed_item(field: dataclasses.Field, kind: Any, text: str) -> Any:
    """One value of a field from its text on a command line. Raises ValueError, as "is 'x'; must be …"."""
    rule, choices = field.metadata["rule"], choices_of(kind)
    if choices:
        if text not in choices:
            raise ValueError(not_a_choice(text, choices))
        return text
    value = PARSERS[kind](text)
    if value is None or (rule is not None and not rule.holds(value)):
        raise ValueError(f"is {text!r}; must be {words_of(kind, rule)}")
    return value


def hint_of_key(key: str, value: Any, known: Collection[str]) -> str:
    """The end of a message about a key of a file, or an argument of TrainConfig, that is no setting."""
    values = value if isinstance(value, list | tuple) else [value]
    texts = [text_of_value(item) for item in values if isinstance(item, str | bool | int | float)]
    hint = alias_hint(key, texts, TRAIN_ALIASES, known, key_with_value)
    return hint or f"{suggest_closest(key, known)}; `ligermodels train --help` lists them"


def key_with_value(key: str, value: str | None) -> str:
    return key if value is None else f"{key}, with the value {value}"


def text_of_value(value: str | bool | int | float) -> str:
    """The text that the command line would have for a value of a file."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def not_a_choice(value: Any, choices: Sequence[str]) -> str:
    return f"is {value!r}; must be one of {', '.join(choices)}{suggest_closest(str(value), choices)}"


def words_of(kind: type, rule: Constraint | None) -> str:
    return rule.words if rule else {bool: "on or off", str: "text", Path: "a path"}[kind]


def parse_int(text: str) -> int | None:
    return int(text) if is_whole_number(text) else None


def parse_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_switch(text: str) -> bool | None:
    """ "on" and "off"; in a file true and false as well."""
    return {"on": True, "true": True, "off": False, "false": False}.get(text)


PARSERS: Mapping[type, Callable[[str], Any]] = {
    int: parse_int, float: parse_float, bool: parse_switch, str: str, Path: Path,
}  # fmt: skip


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
    group: str, default: Any, help: str, rule: Constraint | None = None, *, metavar: str | None = None,
    shown: str | None = None, may_be_empty: bool = False, objectives: Sequence[str] = OBJECTIVE_NAMES,
    names: Named | None = None, built_in: Collection[str] = (),
) -> Any:  # fmt: skip
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
