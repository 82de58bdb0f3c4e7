"""The fields of Gemma, Gemma 2, Mistral and Ministral 3, which are also text models of multimodal checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.configs.base import KERNEL_ACTIVATIONS
from ligermodels.configs.features import SlidingWindowConfig, SoftcapConfig, UnitOffsetConfig
from ligermodels.configs.rope import FULL_ATTENTION, QueryScale, Rope


@dataclass(kw_only=True)
class GemmaConfig(UnitOffsetConfig):
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 8192
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def activation(self) -> str:
        """In Gemma's files "gelu" means the tanh approximation."""
        return "gelu_tanh" if self.hidden_act == "gelu" else KERNEL_ACTIVATIONS[self.hidden_act]


@dataclass(kw_only=True)
class Gemma2Config(SoftcapConfig):
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 8192
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


SCALED_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@dataclass(kw_only=True)
class MistralConfig(SlidingWindowConfig):
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


@dataclass(kw_only=True)
class Ministral3Config(SlidingWindowConfig):
    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        given = any(raw.get(key) is not None for key in ("rope_theta", "rope_scaling", "rope_parameters"))
        return super().read_ropes(raw if given else dict(raw) | {"rope_parameters": SCALED_YARN})

    @property
    def query_scale(self) -> QueryScale | None:
        rope = self.ropes[FULL_ATTENTION]
        if not rope.llama_4_scaling_beta:
            return None
        return QueryScale(rope.llama_4_scaling_beta, rope.original_max_position_embeddings or 1)
