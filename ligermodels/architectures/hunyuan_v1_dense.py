"""Hunyuan dense, 0.5B to 7B: Llama with QK-norm after RoPE, and RoPE whose theta is stretched by a fixed alpha."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ligermodels.configs.base import Config, preset, tiny
from ligermodels.configs.fields import read_field
from ligermodels.configs.rope import FULL_ATTENTION, Rope
from ligermodels.layers.attention import RotatedQKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rename, Rule, packed_projections


@dataclass(kw_only=True)
class HunyuanConfig(Config):
    vocab_size: int = 290943
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0

    only_values: ClassVar = {"use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True}

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        (rope,) = super().read_ropes(raw).values()
        heads = raw.get("num_attention_heads", cls.num_attention_heads)
        return {FULL_ATTENTION: stretched(rope, raw, raw.get("head_dim") or raw.get("hidden_size", 4096) // heads)}


def stretched(rope: Rope, raw: Mapping[str, Any], head_dim: int) -> Rope:
    """The rotary embedding with theta alpha^(R / (R - 2)), which files name "dynamic", with an alpha."""
    alpha = (raw.get("rope_scaling") or raw.get("rope_parameters") or {}).get("alpha")
    if rope.rope_type != "dynamic" or not alpha:
        return rope
    stretch = read_field("alpha", alpha, float) ** (head_dim / (head_dim - 2))
    return replace(rope, rope_type="default", rope_theta=rope.rope_theta * stretch)


BASE = {"model_type": "hunyuan_v1_dense", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
HUB = BASE | {"max_position_embeddings": 262144, "rope_scaling": ALPHA, "tie_word_embeddings": True, "bos_token_id": 1}


class HunyuanDense(CausalLM):
    Config = HunyuanConfig
    hub_class = "HunYuanDenseV1ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"pad_token_id": None, "head_dim": 32},
        "1.8b": preset(HUB, 2048, 6144, 32, 16, 4) | {"vocab_size": 120818, "head_dim": 128},
        "7b": preset(HUB, 4096, 14336, 32, 32, 8) | {"vocab_size": 128167, "head_dim": 128},
    }

    def layer(self, config: HunyuanConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, RotatedQKNormAttention(config, **config.attention_biases), GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        attention = "model.layers.{}.self_attn."
        norms = (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"))
        renamed = (Rename(attention + hub, attention + ours) for hub, ours in norms)
        return (*packed_projections(self.config), *renamed)
