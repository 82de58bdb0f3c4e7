"""Type and range checks of single fields of a config.json."""

import math
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ligermodels.errors import ConfigError

# typing's own evaluates the annotations of a class, and of all its bases, again in every call.
type_hints: Callable[[type], dict[str, Any]] = cache(typing.get_type_hints)
MAY_BE_ZERO = (
    "pad_token_id", "attention_dropout", "dropout", "embd_pdrop", "resid_pdrop", "initializer_range",
    "max_window_layers", "sliding_window", "router_aux_loss_coef", "router_jitter_noise", "num_experts",
    "num_local_experts", "num_experts_per_tok", "mscale_all_dim", "llama_4_scaling_beta", "residual_dropout",
    "num_kv_shared_layers", "hidden_size_per_layer_input", "first_k_dense_replace", "n_shared_experts",
    "num_nextn_predict_layers", "mtp_num_hidden_layers",
)  # fmt: skip
MAY_BE_NEGATIVE = ("pad_token_id", "vision_feature_layer")  # old files write -1 for none; counted from the end
# Null stands for the default, of dropout for none, although the field is a number.
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "attention_dropout")
# Several times the largest value of any released model, so that a damaged file cannot ask for an impossible size.
LIMITS = {
    # Of linear_key_head_dim and mamba_d_state it is what the kernels support.
    2**8: "linear_key_head_dim mamba_d_state mamba_expand num_channels in_channels temporal_patch_size "
    "spatial_merge_size max_num_tiles",
    2**9: "num_hidden_layers num_global_layers",
    2**10: "num_nextn_predict_layers mtp_num_hidden_layers depth",
    2**12: "num_attention_heads num_key_value_heads head_dim num_experts num_local_experts n_routed_experts "
    "n_shared_experts global_head_dim num_global_key_value_heads qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_n_heads "
    "mamba_n_groups image_size patch_size num_heads num_experts_per_tok top_k_experts",
    2**16: "hidden_size_per_layer_input q_lora_rank kv_lora_rank mm_tokens_per_image factor mscale mscale_all_dim "
    "attention_factor",
    2**20: "hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size embed_dim out_hidden_size window_size vision_output_dim projection_dim "
    "num_position_embeddings block_multiple_of",
    2**24: "vocab_size vocab_size_per_layer_input",
}  # fmt: skip
MAXIMUM = {name: limit for limit, names in LIMITS.items() for name in names.split()}


def read_field(name: str, value: Any, annotation: Any) -> Any:
    """`value`, validated: it has the annotated type (an int counts as a float) and lies in the field's range. Returns
    lists as tuples and ints of float fields as floats. Raises ConfigError."""
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and (types.NoneType in allowed or name in MAY_BE_NULL):
        return None
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if tuple in kinds and isinstance(value, list):
        return read_items(name, value, next(kind for kind in allowed if typing.get_origin(kind) is tuple))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"config.json: {name} is {value!r}; must be {expected}")
    if isinstance(value, int | float) and bool not in kinds:
        check_range(name, value)
    return value


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises ConfigError unless the value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(
            f"config.json: {name} {value!r} is not supported; must be one of {', '.join(map(repr, choices))}"
        )


def check_range(name: str, value: int | float) -> None:
    """Raises ConfigError if a number is negative, zero or too large, and its field does not allow that."""
    if name in MAY_BE_NEGATIVE:
        return
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        sign = "must not be negative" if name in MAY_BE_ZERO else "must be positive"
        raise ConfigError(f"config.json: {name} is {value!r}; {sign}")
    if value > MAXIMUM.get(name, math.inf):
        raise ConfigError(f"config.json: {name} is {value!r}; must be at most {MAXIMUM[name]}")


def read_items(name: str, values: list[Any], annotation: Any) -> tuple[Any, ...]:
    """The list as a tuple[kind, ...]; raises ConfigError for an item of another kind."""
    kind = typing.get_args(annotation)[0]
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            raise ConfigError(f"config.json: {name}[{index}] is {value!r}; must be {kind.__name__}")
    return tuple(map(kind, values))
