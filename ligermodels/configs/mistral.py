"""The fields of Mistral and of Ministral 3, which are also text models of multimodal checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, QueryScale, Rope

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
