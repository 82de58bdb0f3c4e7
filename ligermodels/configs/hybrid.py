"""Models that mix attention with layers whose memory is a state."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ligermodels.configs.base import Config
from ligermodels.configs.fields import check_choice
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.errors import ConfigError

LINEAR_ATTENTION, CONV = "linear_attention", "conv"  # layer types
MAMBA, ATTENTION = "mamba", "attention"  # what transformers 4 calls LINEAR_ATTENTION and FULL_ATTENTION in Granite 4
# Heads of the smallest presets.
SMALL_HEADS = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
CONV_TAPS = (2, 3, 4)  # of the causal convolutions that the kernels compute
SILU = {"hidden_act": ("silu", "swish")}  # the choices of the activation


@dataclass(kw_only=True)
class GatedDeltaConfig(Config):
    """Gated delta rule in most layers, attention with an output gate in the others. Every norm has weight + 1, but that
    behind the rule."""

    head_dim: int = 256
    max_position_embeddings: int = 32768
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None
    attn_output_gate: bool = True
    use_sliding_window: bool = False
    mtp_num_hidden_layers: int = 1  # layers that predict further tokens, which a checkpoint may lack

    only_values: ClassVar = {"output_gate_type": "swish"}
    unsupported = ("use_sliding_window",)
    choices: ClassVar = SILU | {"attn_output_gate": [True], "linear_conv_kernel_dim": CONV_TAPS}
    norm_offset = 1.0
    partial_rotary = True
    default_partial_rotary_factor = 0.25

    @property
    def linear_key_size(self) -> int:
        """Width of all key heads of the delta rule together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Width of all its value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def is_linear(self, layer: int) -> bool:
        """Whether this layer has the delta rule; by default all but every full_attention_interval-th."""
        if self.layer_types is not None:
            return self.layer_types[layer] == LINEAR_ATTENTION
        return (layer + 1) % self.full_attention_interval != 0

    def validate(self) -> None:
        super().validate()
        self.check_one_per_layer("layer_types", [FULL_ATTENTION, LINEAR_ATTENTION])
        self.check_divides("linear_num_key_heads", "linear_num_value_heads")


@dataclass(kw_only=True)
class ShortConvConfig(Config):
    """Gated short convolutions in most layers, attention with QK-norm in the others, under LFM2's names of fields."""

    vocab_size: int = 65536
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    conv_L_cache: int = 3
    conv_bias: bool = False
    layer_types: tuple[str, ...] | None = None

    only_values: ClassVar = {"block_use_swiglu": True, "use_pos_enc": True}
    choices: ClassVar = SILU | {"conv_L_cache": CONV_TAPS}
    default_rope_theta = 1_000_000.0
    names: ClassVar[Mapping[str, str]] = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The family's own names take precedence, as in the reference."""
        return super().fields_of({**raw, **{ours: raw[name] for name, ours in cls.names.items() if name in raw}})

    def to_dict(self) -> dict[str, Any]:
        """Writes the fields of every family; the family's own names have the present values, too."""
        return super().to_dict() | {name: getattr(self, ours) for name, ours in self.names.items() if name in self.raw}

    def untied(self) -> Self:
        config = super().untied()
        if "tie_embedding" in config.raw:
            config.raw = dict(config.raw) | {"tie_embedding": False}
        return config

    def is_conv(self, layer: int) -> bool:
        """Whether this layer has a convolution; without layer_types none has."""
        return self.layer_types is not None and self.layer_types[layer] == CONV

    def validate(self) -> None:
        super().validate()
        self.check_one_per_layer("layer_types", [FULL_ATTENTION, CONV])


def conv_layers(count: int, attention: Collection[int]) -> tuple[str, ...]:
    """layer_types with attention in these layers, and convolutions in the others."""
    return tuple(FULL_ATTENTION if layer in attention else CONV for layer in range(count))


@dataclass(kw_only=True)
class Mamba2Config(Config):
    """Mamba-2 in most layers or in all, attention in the others."""

    layer_types: tuple[str, ...] | None = None
    position_embedding_type: str | None = None
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, ...] = (0.0, math.inf)

    choices: ClassVar = SILU | {"position_embedding_type": [None, "rope", "nope"], "mamba_d_conv": CONV_TAPS}

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of({**raw, "time_step_limit": read_limit(raw.get("time_step_limit"))})

    @property
    def mamba_size(self) -> int:
        """Width of all heads of Mamba-2 together."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba_head_size(self) -> int:
        return self.mamba_size // self.mamba_n_heads

    @property
    def attention_rope(self) -> str | None:
        """Which rotary embedding attention has; None for none."""
        return FULL_ATTENTION if self.position_embedding_type == "rope" else None

    def is_mamba(self, layer: int) -> bool:
        """Whether this layer has Mamba-2; without layer_types all have."""
        return self.layer_types is None or self.layer_types[layer] in (MAMBA, LINEAR_ATTENTION)

    def validate(self) -> None:
        super().validate()
        self.check_one_per_layer("layer_types", [MAMBA, ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION])
        for name, whole in (("mamba_n_heads", self.mamba_size), ("mamba_n_groups", self.mamba_n_heads)):
            if whole % getattr(self, name):
                what = "mamba_expand * hidden_size" if name == "mamba_n_heads" else "mamba_n_heads"
                raise ConfigError(f"config.json: {name} {getattr(self, name)} must divide {what}, {whole}")
        check_choice("mamba_d_head", self.mamba_d_head, ["auto", self.mamba_head_size])
        limits = self.time_step_limit
        if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
            raise ConfigError(
                f"config.json: time_step_limit {list(limits)} must be two numbers, the first at least 0 "
                "and the second not below it"
            )


def read_limit(value: Any) -> Any:
    """time_step_limit in either spelling: transformers 5 writes infinity as an object. Null stands for no limit."""
    if value is None:
        return [0.0, math.inf]
    return [math.inf if item == {"__float__": "Infinity"} else item for item in value] if type(value) is list else value
