"""What every family's config.json has in common, read from both spellings (transformers 4 and 5).

Field names are the Hub's. Class defaults are those of the reference implementation, for files that leave a key out.
Keys that change nothing are kept in `raw` and written back; keys that would change the maths and are not supported
are refused by name. Must not know any architecture: each one subclasses `Config` with what it adds.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ligermodels.errors import ConfigError

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
MAY_BE_ZERO = ("pad_token_id", "attention_dropout", "initializer_range", "max_window_layers")
# The supported scalings of RoPE, and what a file must say for each.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: theta and the scaling applied to its frequencies (layers/rope.py has the maths)."""

    rope_theta: float
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(kw_only=True)
class Config:
    """Not frozen: trainers write fields of their own to a model's config."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    attention_dropout: float = 0.0
    raw: Mapping[str, Any] = field(compare=False, repr=False)

    default_rope_theta: typing.ClassVar[float] = 10_000.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads the content of a config.json; raises ConfigError naming the field."""
        annotations = typing.get_type_hints(cls)
        names = [f.name for f in dataclasses.fields(cls) if f.name not in ("rope", "raw")]
        values = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
        values |= {name: checked(name, raw[name], annotations[name]) for name in names if name in raw}
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values["num_attention_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = head_dim(values["hidden_size"], values["num_attention_heads"])
        config = cls(**values, rope=read_rope(raw, cls.default_rope_theta), raw=dict(raw))
        config.validate()
        return config

    def validate(self) -> None:
        """Refuses what the reference would compute and we would not, and sizes that contradict each other."""
        if self.raw.get("quantization_config"):
            raise ConfigError(
                "config.json: quantization_config: quantised checkpoints are not supported; load the original"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"config.json: hidden_act {self.hidden_act!r} is not supported; one of {list(ACTIVATIONS)} is"
            )
        if self.rope.partial_rotary_factor != 1.0:
            raise ConfigError(
                f"config.json: partial_rotary_factor {self.rope.partial_rotary_factor} is not supported here"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"config.json: num_key_value_heads {self.num_key_value_heads} must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"config.json: head_dim {self.head_dim} must be even: RoPE rotates pairs")

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def activation(self) -> str:
        return ACTIVATIONS[self.hidden_act]

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None for all before it."""
        return None


def head_dim(hidden_size: int, num_attention_heads: int) -> int:
    if hidden_size % num_attention_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {num_attention_heads} must divide hidden_size {hidden_size} "
            "where head_dim is not given"
        )
    return hidden_size // num_attention_heads


def read_rope(raw: Mapping[str, Any], default_theta: float) -> Rope:
    """rope_scaling wins over rope_parameters; what the dict lacks is looked up at the top level."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config.json: rope_scaling is {scaling!r}; must be an object or null")
    values: dict[str, Any] = {"rope_theta": default_theta}
    annotations = typing.get_type_hints(Rope)
    for source in (raw, scaling):
        values |= {k: checked(k, source[k], annotations[k]) for k in annotations if source.get(k) is not None}
    values["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    if values["rope_type"] not in ROPE_TYPES:
        raise ConfigError(
            f"config.json: rope type {values['rope_type']!r} is not supported; one of {list(ROPE_TYPES)} is"
        )
    missing = [key for key in ROPE_TYPES[values["rope_type"]] if key not in values]
    if missing:
        raise ConfigError(f"config.json: rope_scaling of type {values['rope_type']!r} lacks {', '.join(missing)}")
    return Rope(**values)


def checked(name: str, value: Any, annotation: Any) -> Any:
    """`value` if it is of the annotated type (an int passes for a float) and sizes are positive; else ConfigError."""
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and (types.NoneType in allowed or name in ("num_key_value_heads", "head_dim")):
        return None
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if tuple in kinds and isinstance(value, list):
        return tuple(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"config.json: {name} is {value!r}; must be {expected}")
    if isinstance(value, int | float) and bool not in kinds and value <= 0 and name not in MAY_BE_ZERO:
        raise ConfigError(f"config.json: {name} is {value!r}; must be positive")
    return value


def preset(base: Mapping[str, Any], hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    """The content of a config.json with these sizes."""
    return dict(base) | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
