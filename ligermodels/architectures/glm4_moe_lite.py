"""GLM-4.7-Flash: GLM-4.7 with multi-head latent attention.

The layer that predicts a further token, behind the last layer, is kept, not computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import GroupedRoutingConfig, LatentAttentionConfig
from ligermodels.configs.fields import check_choice
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import GroupedRoutingLM
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.weights.mapping import Rule, packed_latents


@dataclass(kw_only=True)
class Glm4MoeLiteConfig(GroupedRoutingConfig, LatentAttentionConfig):
    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    moe_intermediate_size: int = 1536
    n_routed_experts: int = 64
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.8
    mlp_layer_types: tuple[str, ...] | None = None  # null: the first layer is dense

    def is_sparse(self, layer: int) -> bool:
        return layer > 0 if self.mlp_layer_types is None else self.mlp_layer_types[layer] == "sparse"

    def validate(self) -> None:
        super().validate()
        self.check_one_per_layer("mlp_layer_types", ["dense", "sparse"])
        if self.mlp_layer_types is None:  # the reference does not read first_k_dense_replace
            check_choice("first_k_dense_replace", self.first_k_dense_replace, [1])


BASE = {"model_type": "glm4_moe_lite", "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0}
SMALL = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64}
TINY = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


class Glm4MoeLite(GroupedRoutingLM):
    config: Glm4MoeLiteConfig
    Config = Glm4MoeLiteConfig
    hub_class = "Glm4MoeLiteForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"num_key_value_heads": 4} | SMALL | TINY,
        "30b-a3b": preset(BASE, 2048, 10240, 47, 20, 20) | {"rope_theta": 1000000.0},
    }

    def layer(self, config: Glm4MoeLiteConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, LatentAttention(config), self.feed_forward(config, index))

    def attention_rule(self) -> Rule:
        return packed_latents(self.config)
