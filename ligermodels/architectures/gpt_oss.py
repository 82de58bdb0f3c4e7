"""gpt-oss: attention with learnable sinks and a window in every other layer; experts with biases and a clamped SwiGLU.

The Hub stores the experts in MXFP4, or in 16 bits with gate and up columns alternating.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MoEConfig, SlidingWindowConfig
from ligermodels.configs.fields import check_choice
from ligermodels.configs.rope import FULL_ATTENTION, Rope, read_rope
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.moe import MoE, Router
from ligermodels.weights.mapping import Permute, Rename, Rule, packed_qkv

DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# The values of all published models, which the kernels have as constants.
FIXED = {"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}


@dataclass(kw_only=True)
class GptOssConfig(MoEConfig, SlidingWindowConfig):
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    default_rope_theta = 150_000.0

    @property
    def activation(self) -> str:
        return "clamped_silu"

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        """YaRN, unless the file has another scaling."""
        scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or DEFAULT_ROPE
        return {FULL_ATTENTION: read_rope({**raw, "rope_scaling": scaling}, cls.default_rope_theta)}

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0

    def validate(self) -> None:
        super().validate()
        self.reject_if_set("attention_dropout")
        for name, value in FIXED.items():
            check_choice(name, getattr(self, name), [value])


BASE = {"model_type": "gpt_oss", "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128}
TINY = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "intermediate_size": 96}
HUB = BASE | {
    "vocab_size": 201088, "head_dim": 64, "max_position_embeddings": 131072, "rope_scaling": DEFAULT_ROPE,
    "pad_token_id": 199999, "eos_token_id": 200002,
}  # fmt: skip
EXPERTS, MLP = "model.layers.{}.mlp.experts.", "model.layers.{}.mlp."


class GptOss(CausalLM):
    config: GptOssConfig
    Config = GptOssConfig
    hub_class = "GptOssForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "20b": preset(HUB, 2880, 2880, 24, 64, 8) | {"num_local_experts": 32},
        "120b": preset(HUB, 2880, 2880, 36, 64, 8) | {"num_local_experts": 128},
    }

    def layer(self, config: GptOssConfig, index: int) -> DecoderLayer:
        bias = config.attention_bias
        attention = Attention(config, qkv_bias=bias, o_bias=bias, window=config.window(index), sinks=True)
        experts = MoE(
            config, intermediate_size=config.intermediate_size, num_experts=config.num_local_experts,
            experts_per_token=config.num_experts_per_tok, normalize=True, bias=True,
            router=Router(config, config.num_local_experts, bias=True),
        )  # fmt: skip
        return DecoderLayer(config, attention, experts)

    def shared_rules(self) -> tuple[Rule, ...]:
        """The rules of everything but the weights of the experts."""
        experts, inner = self.config.num_local_experts, self.config.intermediate_size
        bias = EXPERTS + "gate_up_proj_bias"
        return (
            packed_qkv(self.config),
            Rename(MLP + "router", MLP + "gate"),
            Permute(Rename(bias, bias), bias, ((experts,), (inner, 2)), (0, 2, 1)),
        )

    def weight_rules(self) -> tuple[Rule, ...]:
        """The names of 16-bit files: inputs before outputs, gate and up alternate."""
        experts, hidden, inner = self.config.num_local_experts, self.config.hidden_size, self.config.intermediate_size
        gate_up, down = EXPERTS + "gate_up_proj", EXPERTS + "down_proj"
        return (
            *self.shared_rules(),
            Permute(Rename(gate_up, gate_up), gate_up, ((experts,), (hidden,), (inner, 2)), (0, 3, 2, 1)),
            Permute(Rename(down, down), down, ((experts,), (inner,), (hidden,)), (0, 2, 1)),
        )

    def quantised_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names of MXFP4 files: outputs before inputs, gate and up alternate."""
        experts, inner = self.config.num_local_experts, self.config.intermediate_size
        gate_up, down = EXPERTS + "gate_up_proj", EXPERTS + "down_proj"
        packed = Rename(f"{gate_up}_blocks", gate_up)
        mxfp4 = (
            Permute(packed, f"{gate_up}_blocks", ((experts,), (inner, 2)), (0, 2, 1)),
            Rename(f"{down}_blocks", down),
        )
        return ((*self.shared_rules(), *mxfp4),)
