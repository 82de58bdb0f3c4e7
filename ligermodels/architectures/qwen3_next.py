"""Qwen3-Next-80B-A3B: three layers with the gated delta rule to one of attention with an output gate, and 512 experts.

The layers that predict further tokens are kept, not computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SparseStepConfig
from ligermodels.configs.hybrid import SMALL_HEADS, GatedDeltaConfig
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.gated_delta import GroupedGatedDeltaNet, delta_or_attention
from ligermodels.layers.grouped_routing import ExpertsLM
from ligermodels.layers.moe import experts_or_mlp
from ligermodels.weights.mapping import Concat, KeptLayers, Rule, further_token_layers, packed_gate_up, packed_qkv


@dataclass(kw_only=True)
class Qwen3NextConfig(GatedDeltaConfig, SparseStepConfig):
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True


BASE = {"model_type": "qwen3_next"}
TINY = SMALL_HEADS | {"num_experts": 8, "num_experts_per_tok": 2}
TINY |= {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
HUB = BASE | {"max_position_embeddings": 262144, "rope_theta": 10000000.0, "eos_token_id": 151645}
LINEAR = "model.layers.{}.linear_attn."


class Qwen3Next(ExpertsLM):
    config: Qwen3NextConfig
    Config = Qwen3NextConfig
    hub_class = "Qwen3NextForCausalLM"
    SIZES: ClassVar = {"tiny": tiny(BASE) | TINY, "80b-a3b": preset(HUB, 2048, 5120, 48, 16, 2)}

    def layer(self, config: Qwen3NextConfig, index: int) -> DecoderLayer:
        mixer = delta_or_attention(config, index, GroupedGatedDeltaNet)
        shared, normalize = config.shared_expert_intermediate_size, config.norm_topk_prob
        mlp = experts_or_mlp(config, index, normalize=normalize, shared_intermediate_size=shared)
        return DecoderLayer(config, mixer, mlp)

    def shared_rules(self) -> tuple[Rule, ...]:
        config = self.config
        sizes = 2 * (config.linear_key_size + config.linear_value_size), 2 * config.linear_num_value_heads
        linear = Concat(LINEAR + "in_proj", (LINEAR + "in_proj_qkvz", LINEAR + "in_proj_ba"), sizes)
        return packed_qkv(config, query_parts=2), linear, packed_gate_up(), packed_gate_up("mlp.shared_expert")

    def kept_layers(self) -> KeptLayers:
        return further_token_layers(self.config)

    def kept_tensors(self) -> tuple[str, ...]:
        return ("mtp",)
