"""DeepSeek-V3, R1, V3.1: multi-head latent attention, experts chosen within groups by sigmoid scores.

The layer that predicts a further token, behind the last layer, is kept, not computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import GroupedRoutingConfig, LatentAttentionConfig
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import GroupedRoutingLM
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.weights.mapping import Rule, packed_latents


@dataclass(kw_only=True)
class DeepseekV3Config(GroupedRoutingConfig, LatentAttentionConfig):
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    max_position_embeddings: int = 4096
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = 3


BASE = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
SMALL = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
TINY = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_group": 2, "topk_group": 1}
LONG_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0, "mscale": 1.0,
}  # fmt: skip


class DeepseekV3(GroupedRoutingLM):
    config: DeepseekV3Config
    Config = DeepseekV3Config
    hub_class = "DeepseekV3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"num_key_value_heads": 4, "first_k_dense_replace": 1} | SMALL | TINY,
        "671b-a37b": preset(BASE, 7168, 18432, 61, 128, 128)
        | {"max_position_embeddings": 163840, "rope_scaling": LONG_YARN, "rope_theta": 10000.0},
    }

    def layer(self, config: DeepseekV3Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, LatentAttention(config), self.feed_forward(config, index))

    def attention_rule(self) -> Rule:
        return packed_latents(self.config)
