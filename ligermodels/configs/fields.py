"""Fields of a config.json, checked one by one. Must not know what any of them means."""

import math
import types
import typing
from typing import Any

from ligermodels.errors import ConfigError

MAY_BE_ZERO = (
    "pad_token_id", "attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "max_window_layers",
    "sliding_window", "router_aux_loss_coef", "router_jitter_noise", "num_experts",
)  # fmt: skip
MAY_BE_NEGATIVE = ("pad_token_id",)  # old files have -1 for none
MAY_BE_NULL = ("num_key_value_heads", "head_dim")  # although they end up as numbers: null asks for the usual value
# Several times what any released model has. A damaged file can so not ask for what no machine can hold or count.
AT_MOST = {
    "num_hidden_layers": 1024,
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_channels": 2**8,
    "image_size": 2**12,
    "patch_size": 2**12,
}


def checked(name: str, value: Any, annotation: Any) -> Any:
    """`value` if it is of the annotated type (an int passes for a float) and sizes are positive; else ConfigError."""
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and (types.NoneType in allowed or name in MAY_BE_NULL):
        return None
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if tuple in kinds and isinstance(value, list):
        return checked_items(name, value, next(kind for kind in allowed if typing.get_origin(kind) is tuple))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"config.json: {name} is {value!r}; must be {expected}")
    if isinstance(value, int | float) and bool not in kinds:
        refuse_out_of_range(name, value)
    return value


def refuse_out_of_range(name: str, value: int | float) -> None:
    if name in MAY_BE_NEGATIVE:
        return
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        sign = "must not be negative" if name in MAY_BE_ZERO else "must be positive"
        raise ConfigError(f"config.json: {name} is {value!r}; {sign}")
    if value > AT_MOST.get(name, math.inf):
        raise ConfigError(f"config.json: {name} is {value!r}; must be at most {AT_MOST[name]}")


def checked_items(name: str, values: list[Any], annotation: Any) -> tuple[Any, ...]:
    """The list as a tuple[kind, ...], each item of that kind."""
    kind = typing.get_args(annotation)[0]
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            raise ConfigError(f"config.json: {name}[{index}] is {value!r}; must be {kind.__name__}")
    return tuple(map(kind, values))
