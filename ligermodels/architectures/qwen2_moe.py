"""Qwen1.5-MoE, Qwen2-57B-A14B: Qwen2 with routed experts and a shared expert behind a sigmoid gate."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SparseStepConfig, SwitchedWindowConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import ExpertsLM
from ligermodels.layers.moe import experts_or_mlp
from ligermodels.weights.mapping import Rule, packed_gate_up, packed_projections


@dataclass(kw_only=True)
class Qwen2MoeConfig(SparseStepConfig, SwitchedWindowConfig):
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 32768
    qkv_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632

    def is_sliding(self, layer: int) -> bool:
        """Unlike Qwen2: every other layer, below max_window_layers."""
        return self.use_sliding_window and layer < self.max_window_layers and layer % 2 == 0


BASE = {"model_type": "qwen2_moe"}
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 192}
HUB = BASE | {"rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151643}


class Qwen2Moe(ExpertsLM):
    config: Qwen2MoeConfig
    Config = Qwen2MoeConfig
    hub_class = "Qwen2MoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "a2.7b": preset(HUB, 2048, 5632, 24, 16, 16) | {"max_position_embeddings": 8192},
        "57b-a14b": preset(HUB, 3584, 18944, 28, 28, 4)
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
        | {"shared_expert_intermediate_size": 20480},
    }

    def layer(self, config: Qwen2MoeConfig, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.qkv_bias, window=config.window(index))
        shared, normalize = config.shared_expert_intermediate_size, config.norm_topk_prob
        mlp = experts_or_mlp(config, index, normalize=normalize, shared_intermediate_size=shared)
        return DecoderLayer(config, attention, mlp)

    def shared_rules(self) -> tuple[Rule, ...]:
        return (*packed_projections(self.config), packed_gate_up("mlp.shared_expert"))
