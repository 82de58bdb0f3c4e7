"""Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer; top-2 of 8, routing weights sum to 1."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MoEConfig, SlidingWindowConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import ExpertsLM
from ligermodels.layers.moe import MoE
from ligermodels.weights.mapping import Rename, Rule


@dataclass(kw_only=True)
class MixtralConfig(MoEConfig, SlidingWindowConfig):
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    router_jitter_noise: float = 0.0

    unsupported = ("router_jitter_noise",)
    default_rope_theta = 1_000_000.0


BASE = {"model_type": "mixtral", "rms_norm_eps": 1e-5}
HUB = BASE | {"sliding_window": None, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2}


class Mixtral(ExpertsLM):
    Config = MixtralConfig
    expert_names = ("block_sparse_moe.experts", "w1", "w3", "w2")
    hub_class = "MixtralForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"intermediate_size": 192, "num_local_experts": 4},
        "8x7b": preset(HUB, 4096, 14336, 32, 32, 8) | {"max_position_embeddings": 32768},
        "8x22b": preset(HUB, 6144, 16384, 56, 48, 8) | {"max_position_embeddings": 65536},
    }

    def layer(self, config: MixtralConfig, index: int) -> DecoderLayer:
        experts = MoE(config, normalize=True, **config.expert_sizes)
        return DecoderLayer(config, Attention(config, window=config.window(index)), experts)

    def weight_rules(self) -> tuple[Rule, ...]:
        gate = Rename("model.layers.{}.block_sparse_moe.gate", "model.layers.{}.mlp.gate")
        return (*super().weight_rules(), gate)
