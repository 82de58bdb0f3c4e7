"""OLMoE 1B-7B: routed experts in every layer, and QK-norm over all heads together."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MoEConfig
from ligermodels.layers.attention import JointQKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import ExpertsLM
from ligermodels.layers.moe import MoE


@dataclass(kw_only=True)
class OlmoeConfig(MoEConfig):
    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.01

    unsupported = ("clip_qkv",)
    experts_field = "num_experts"


BASE = {"model_type": "olmoe", "rms_norm_eps": 1e-5}


class Olmoe(ExpertsLM):
    Config = OlmoeConfig
    hub_class = "OlmoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE)
        | {"intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None},
        "1b-7b": preset(BASE, 2048, 1024, 16, 16, 16) | {"vocab_size": 50304, "max_position_embeddings": 4096},
    }

    def layer(self, config: OlmoeConfig, index: int) -> DecoderLayer:
        experts = MoE(config, normalize=config.norm_topk_prob, **config.expert_sizes)
        return DecoderLayer(config, JointQKNormAttention(config, **config.attention_biases), experts)
