"""Qwen3.5-35B-A3B to 397B-A17B, Qwen3.6: Qwen3.5 with routed experts and a gated shared one in every layer.

The image side and the layers that predict further tokens are kept, not computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MoEConfig
from ligermodels.configs.hybrid import SMALL_HEADS, GatedDeltaConfig
from ligermodels.configs.multimodal import TextPartConfig
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.gated_delta import delta_or_attention
from ligermodels.layers.moe import MoE
from ligermodels.vision.hub_names import TextPartModel
from ligermodels.weights.mapping import (
    KeptLayers,
    Rule,
    further_token_layers,
    packed_delta_projections,
    packed_gate_up,
    stacked_experts,
)


@dataclass(kw_only=True)
class Qwen3_5MoeConfig(GatedDeltaConfig, MoEConfig):
    vocab_size: int = 248320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512

    experts_field = "num_experts"


class Qwen3_5MoeMultimodalConfig(TextPartConfig, Qwen3_5MoeConfig):
    text_type = "qwen3_5_moe_text"


BASE = {"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 0}
TINY = SMALL_HEADS | {"num_experts": 8, "num_experts_per_tok": 2}
TINY |= {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
HUB = BASE | {"max_position_embeddings": 262144, "rope_theta": 10000000.0, "eos_token_id": 248044}
LARGE = {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64}


class Qwen3_5MoeText(TextPartModel):
    config: Qwen3_5MoeConfig
    Config = Qwen3_5MoeConfig
    hub_class = "Qwen3_5MoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "35b-a3b": preset(HUB, 2048, 512, 40, 16, 2),
        "122b-a10b": preset(HUB, 3072, 1024, 48, 32, 2) | LARGE,
        "397b-a17b": preset(HUB, 4096, 1024, 60, 32, 2) | LARGE | {"num_experts": 512, "num_experts_per_tok": 10},
    }

    def layer(self, config: Qwen3_5MoeConfig, index: int) -> DecoderLayer:
        shared = config.shared_expert_intermediate_size
        experts = MoE(config, normalize=True, shared_intermediate_size=shared, **config.expert_sizes)
        return DecoderLayer(config, delta_or_attention(config, index), experts)

    def text_layouts(self) -> tuple[tuple[Rule, ...], ...]:
        """Experts stacked, as in published files, and one by one."""
        stacked = (*packed_delta_projections(self.config), packed_gate_up("mlp.shared_expert"))
        return stacked, (*stacked, *stacked_experts("mlp.experts", "gate_proj", "up_proj", "down_proj"))

    def kept_layers(self) -> KeptLayers:
        return further_token_layers(self.config)

    def kept_tensors(self) -> tuple[str, ...]:
        return "mtp", "model.visual"


class Qwen3_5Moe(Qwen3_5MoeText):
    Config = Qwen3_5MoeMultimodalConfig
    hub_class = "Qwen3_5MoeForConditionalGeneration"
    SIZES: ClassVar = {}
    is_part = True
