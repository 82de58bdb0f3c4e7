"""Qwen3-30B-A3B, Qwen3-235B-A22B: Qwen3 with routed experts in all or some of the layers."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SparseStepConfig, SwitchedWindowConfig
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import ExpertsLM
from ligermodels.layers.moe import experts_or_mlp


@dataclass(kw_only=True)
class Qwen3MoeConfig(SparseStepConfig, SwitchedWindowConfig):
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768

    alternative_names: ClassVar = {"num_experts": "num_local_experts"}

    def is_sliding(self, layer: int) -> bool:
        return self.use_sliding_window


BASE = {"model_type": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True}
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 64}
HUB = BASE | {"rope_theta": 1000000.0, "max_position_embeddings": 40960}


class Qwen3Moe(ExpertsLM):
    Config = Qwen3MoeConfig
    hub_class = "Qwen3MoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "30b-a3b": preset(HUB, 2048, 6144, 48, 32, 4),
        "235b-a22b": preset(HUB, 4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536},
    }

    def layer(self, config: Qwen3MoeConfig, index: int) -> DecoderLayer:
        attention = QKNormAttention(config, **config.attention_biases, window=config.window(index))
        return DecoderLayer(config, attention, experts_or_mlp(config, index, normalize=config.norm_topk_prob))
