"""Granite 3 MoE: Granite with routed experts in every layer, whose routing weights are a softmax over the top k."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MoEConfig, MultiplierConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import ScaledLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.moe import MoE
from ligermodels.weights.mapping import Rule, packed_projections, stacked_granite_experts


@dataclass(kw_only=True)
class GraniteMoeConfig(MoEConfig, MultiplierConfig):
    num_local_experts: int = 8


BASE = {"model_type": "granitemoe"}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}
HUB = BASE | MULTIPLIERS | {"vocab_size": 49155, "max_position_embeddings": 131072, "tie_word_embeddings": True}


class GraniteMoe(CausalLM):
    Config = GraniteMoeConfig
    hub_class = "GraniteMoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE | MULTIPLIERS) | {"intermediate_size": 96, "attention_multiplier": 1 / 32},
        "1b-a400m": preset(HUB, 1024, 512, 24, 16, 8)
        | {"attention_multiplier": 1 / 64, "num_local_experts": 32, "num_experts_per_tok": 8},
        "3b-a800m": preset(HUB, 1536, 512, 32, 24, 8)
        | {"attention_multiplier": 1 / 64, "num_local_experts": 40, "num_experts_per_tok": 8},
    }

    def layer(self, config: GraniteMoeConfig, index: int) -> ScaledLayer:
        attention = Attention(config, **config.attention_biases, scale=config.attention_multiplier)
        experts = MoE(config, normalize=True, **config.expert_sizes)
        return ScaledLayer(config, attention, experts, config.residual_multiplier)

    def weight_rules(self) -> tuple[Rule, ...]:
        return (*packed_projections(self.config), *stacked_granite_experts())

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory."""
        return ((*packed_projections(self.config), *stacked_granite_experts(in_memory=True)),)
