"""Fields of a config.json, checked one by one. Must not know what any of them means."""

import types
import typing
from typing import Any

from ligermodels.errors import ConfigError

MAY_BE_ZERO = (
    "pad_token_id", "attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "max_window_layers",
    "sliding_window", "router_aux_loss_coef", "router_jitter_noise", "num_experts",
)  # fmt: skip
MAY_BE_NULL = ("num_key_value_heads", "head_dim")  # although they end up as numbers: null asks for the usual value


def checked(name: str, value: Any, annotation: Any) -> Any:
    """`value` if it is of the annotated type (an int passes for a float) and sizes are positive; else ConfigError."""
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and (types.NoneType in allowed or name in MAY_BE_NULL):
        return None
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if tuple in kinds and isinstance(value, list):
        return checked_items(name, value, next(kind for kind in allowed if typing.get_origin(kind) is tuple))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"config.json: {name} is {value!r}; must be {expected}")
    if isinstance(value, int | float) and bool not in kinds and value <= 0 and name not in MAY_BE_ZERO:
        raise ConfigError(f"config.json: {name} is {value!r}; must be positive")
    return value


def checked_items(name: str, values: list[Any], annotation: Any) -> tuple[Any, ...]:
    """The list as a tuple[kind, ...], each item of that kind."""
    kind = typing.get_args(annotation)[0]
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            raise ConfigError(f"config.json: {name}[{index}] is {value!r}; must be {kind.__name__}")
    return tuple(map(kind, values))
