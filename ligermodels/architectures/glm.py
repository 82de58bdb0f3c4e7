"""GLM-4 9B: Llama with QKV biases, interleaved RoPE on half of each head, and packed gate_up_proj in checkpoints."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import HalfRotaryConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rule, packed_qkv

BASE = {"model_type": "glm", "rms_norm_eps": 1.5625e-07}


class Glm(CausalLM):
    Config = HalfRotaryConfig
    hub_class = "GlmForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "pad_token_id": None},
        "9b": preset(BASE, 4096, 13696, 40, 32, 2) | {"head_dim": 128, "vocab_size": 151552},
    }

    def layer(self, config: HalfRotaryConfig, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, interleaved=True)
        return DecoderLayer(config, attention, GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        return (packed_qkv(self.config),)
