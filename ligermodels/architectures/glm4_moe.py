"""GLM-4.5, 4.5-Air, 4.6, 4.7: routed experts beside an ungated shared one, sigmoid router with a correction bias.

The layers that predict further tokens, behind the last layer, are kept, not computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import GroupedRoutingConfig
from ligermodels.layers.attention import Attention, QKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import GroupedRoutingLM


@dataclass(kw_only=True)
class Glm4MoeConfig(GroupedRoutingConfig):
    vocab_size: int = 151552
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    use_qk_norm: bool = False

    partial_rotary = True
    default_partial_rotary_factor = 0.5


BASE = {"model_type": "glm4_moe", "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0}
TINY = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 64}
HUB = BASE | {"rope_theta": 1000000.0, "head_dim": 128, "attention_bias": True, "vocab_size": 151552}


class Glm4Moe(GroupedRoutingLM):
    config: Glm4MoeConfig
    Config = Glm4MoeConfig
    hub_class = "Glm4MoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "106b-a12b": preset(HUB, 4096, 10944, 46, 96, 8) | {"max_position_embeddings": 131072},
        "355b-a32b": preset(HUB, 5120, 12288, 92, 96, 8)
        | {"max_position_embeddings": 202752, "use_qk_norm": True, "n_routed_experts": 160}
        | {"moe_intermediate_size": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    }

    def layer(self, config: Glm4MoeConfig, index: int) -> DecoderLayer:
        attention = (QKNormAttention if config.use_qk_norm else Attention)(config, qkv_bias=config.attention_bias)
        return DecoderLayer(config, attention, self.feed_forward(config, index))
