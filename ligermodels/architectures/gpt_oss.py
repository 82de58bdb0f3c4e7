"""gpt-oss: learnable sinks, a window in every other layer, and experts with biases and a clamped SwiGLU."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import ClampedExpertsConfig, SlidingWindowConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.moe import MoE, Router
from ligermodels.weights.mapping import Rename, Rule, packed_qkv, permuted


@dataclass(kw_only=True)
class GptOssConfig(ClampedExpertsConfig, SlidingWindowConfig):
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

    unsupported = ("attention_dropout",)
    default_rope_theta = 150_000.0
    default_rope_scaling: ClassVar = {
        "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096
    }  # fmt: skip

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


BASE = {"model_type": "gpt_oss", "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128}
TINY = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "intermediate_size": 96}
YARN_TO_131K = {"rope_scaling": GptOssConfig.default_rope_scaling, "max_position_embeddings": 131072}
HUB = BASE | YARN_TO_131K | {"vocab_size": 201088, "head_dim": 64, "pad_token_id": 199999, "eos_token_id": 200002}
EXPERTS, ROUTER = "model.layers.{}.mlp.experts.", Rename("model.layers.{}.mlp.router", "model.layers.{}.mlp.gate")
GATE_UP, DOWN = EXPERTS + "gate_up_proj", EXPERTS + "down_proj"


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
        attention = Attention(config, **config.attention_biases, window=config.window(index), sinks=True)
        router = Router(config, config.num_local_experts, bias=True)
        experts = MoE(config, normalize=True, bias=True, router=router, **config.expert_sizes)
        return DecoderLayer(config, attention, experts)

    def rules(self, *weights: Rule) -> tuple[Rule, ...]:
        """The rules of `weights`, which are those of the experts, and of everything else. Gates and ups alternate."""
        gates = (self.config.num_local_experts,), (self.config.intermediate_size, 2)
        return (packed_qkv(self.config), ROUTER, permuted(GATE_UP + "_bias", gates, (0, 2, 1)), *weights)

    def weight_rules(self) -> tuple[Rule, ...]:
        """The layout of 16-bit files: inputs before outputs."""
        experts, hidden, inner = self.config.num_local_experts, self.config.hidden_size, self.config.intermediate_size
        gate_up = permuted(GATE_UP, ((experts,), (hidden,), (inner, 2)), (0, 3, 2, 1))
        return self.rules(gate_up, permuted(DOWN, ((experts,), (inner,), (hidden,)), (0, 2, 1)))

    def quantised_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The layout of MXFP4 files: outputs before inputs."""
        gates = (self.config.num_local_experts,), (self.config.intermediate_size, 2)
        gate_up = permuted(GATE_UP, gates, (0, 2, 1), hub=GATE_UP + "_blocks")
        return (self.rules(gate_up, Rename(DOWN + "_blocks", DOWN)),)
