"""GLM-4-0414: GLM-4 with RMSNorm before and after each branch."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import HalfRotaryConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import SandwichLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rename, Rule, packed_qkv

BASE = {"model_type": "glm4", "rms_norm_eps": 1e-5}


class Glm4(CausalLM):
    Config = HalfRotaryConfig
    hub_class = "Glm4ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "pad_token_id": None},
        "9b": preset(BASE, 4096, 13696, 40, 32, 2) | {"head_dim": 128, "vocab_size": 151552},
    }

    def layer(self, config: HalfRotaryConfig, index: int) -> SandwichLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, interleaved=True)
        return SandwichLayer(config, attention, GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        """On the Hub, post_attention_layernorm is the norm before the MLP."""
        layer = "model.layers.{}."
        return (
            packed_qkv(self.config),
            Rename(layer + "post_self_attn_layernorm", layer + "post_attention_layernorm"),
            Rename(layer + "post_attention_layernorm", layer + "pre_feedforward_layernorm"),
            Rename(layer + "post_mlp_layernorm", layer + "post_feedforward_layernorm"),
        )
