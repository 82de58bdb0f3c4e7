"""LFM2: gated short convolutions, and attention with QK-norm in some layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.hybrid import ShortConvConfig, conv_layers
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.states import conv_or_attention
from ligermodels.weights.mapping import Rule, packed_short_conv_layers


@dataclass(kw_only=True)
class Lfm2Config(ShortConvConfig):
    hidden_size: int = 2560
    intermediate_size: int = 12288
    full_attn_idxs: tuple[int, ...] | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float = 1.0
    block_multiple_of: int = 256

    names: ClassVar = {**ShortConvConfig.names, "block_ff_dim": "intermediate_size"}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_dict(raw)
        if config.layer_types is None and config.full_attn_idxs is not None:
            config.layer_types = conv_layers(config.num_hidden_layers, config.full_attn_idxs)
        return config

    @property
    def feed_forward_size(self) -> int:
        """Two thirds of intermediate_size, times the multiplier, rounded up; intermediate_size if not adjusted."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size, unit = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3)), self.block_multiple_of
        return -(-size // unit) * unit


BASE = {"model_type": "lfm2"}
SMALL = {"full_attn_idxs": [1, 3], "block_multiple_of": 32}
HUB = BASE | {"bos_token_id": 1, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}


class Lfm2(CausalLM):
    config: Lfm2Config
    Config = Lfm2Config
    hub_class = "Lfm2ForCausalLM"
    SIZES: ClassVar = {"tiny": tiny(BASE) | SMALL, "1.2b": preset(HUB, 2048, 12288, 16, 32, 8)}

    def layer(self, config: Lfm2Config, index: int) -> DecoderLayer:
        mlp = GatedMLP(config, intermediate_size=config.feed_forward_size)
        return DecoderLayer(config, conv_or_attention(config, index), mlp)

    def weight_rules(self) -> tuple[Rule, ...]:
        return packed_short_conv_layers(self.config)
