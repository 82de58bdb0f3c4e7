"""Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B: Qwen3-VL with routed experts in all or some of the text model's layers."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset
from ligermodels.configs.features import SparseStepConfig
from ligermodels.configs.qwen_vl import QWEN3_VL_TEXT, TINY_QWEN3_VL, TINY_TEXT, VISION_TOKENS, Qwen3VLTextConfig
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.moe import experts_or_mlp
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.qwen3_vl import QWEN3_NAMES, Qwen3Placer, qwen3_tower
from ligermodels.vision.tower import PatchMerger
from ligermodels.weights.mapping import Rule, packed_projections, permuted


@dataclass(kw_only=True)
class Qwen3VLMoeConfig(Qwen3VLTextConfig, SparseStepConfig):
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408

    alternative_names: ClassVar = {"num_experts": "num_local_experts"}


BASE = {"model_type": "qwen3_vl_moe"}
HUB = BASE | VISION_TOKENS
TEXT = QWEN3_VL_TEXT | {"num_experts": 128, "num_experts_per_tok": 8}
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


class Qwen3VLMoe(VisionLanguageModel):
    Config = Qwen3VLMoeConfig
    Placer = Qwen3Placer
    Projector = PatchMerger
    tower = staticmethod(qwen3_tower)
    names = QWEN3_NAMES
    hub_class = "Qwen3VLMoeForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE | TINY_QWEN3_VL | {"text_config": TINY_TEXT | TINY},
        "30b-a3b": HUB
        | {
            "text_config": preset(TEXT, 2048, 6144, 48, 32, 4) | {"moe_intermediate_size": 768},
            "vision_config": {"out_hidden_size": 2048},
        },
        "235b-a22b": HUB
        | {
            "text_config": preset(TEXT, 4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536},
            "vision_config": {"out_hidden_size": 4096},
        },
    }

    def layer(self, config: Qwen3VLMoeConfig, index: int) -> DecoderLayer:
        attention = QKNormAttention(config, **config.attention_biases)
        return DecoderLayer(config, attention, experts_or_mlp(config, index, normalize=True))

    def text_rules(self) -> tuple[Rule, ...]:
        """Experts are stacked, inputs before outputs."""
        experts, hidden, inner = self.config.num_experts, self.config.hidden_size, self.config.moe_intermediate_size
        sizes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        transposed = (
            permuted(f"model.layers.{{}}.mlp.experts.{name}", ((experts,), (inputs,), (outputs,)), (0, 2, 1))
            for name, (inputs, outputs) in sizes.items()
        )
        return (*packed_projections(self.config), *transposed)

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The layout that transformers 5 has in memory, where experts are stacked as they are here."""
        return self.names.layouts(packed_projections(self.config))
