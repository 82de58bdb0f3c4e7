"""Phi-3 and Phi-3.5 mini, Phi-4, Phi-4-mini: Llama with packed checkpoint tensors, a sliding window or LongRoPE, and
partial RoPE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, Rope, read_rope
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rule


@dataclass(kw_only=True)
class Phi3Config(SlidingWindowConfig):
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 32000
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0

    unsupported = ("embd_pdrop", "resid_pdrop")
    partial_rotary = True

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        """Old files write "su" or "yarn" for LongRoPE."""
        trained = {"original_max_position_embeddings": 4096}
        former = {"su": "longrope", "yarn": "longrope"}
        return {FULL_ATTENTION: read_rope(trained | dict(raw), cls.default_rope_theta, old_names=former)}


BASE = {"model_type": "phi3", "rms_norm_eps": 1e-5}
HUB = BASE | {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000}


class Phi3(CausalLM):
    Config = Phi3Config
    hub_class = "Phi3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"pad_token_id": None},
        "mini": preset(HUB, 3072, 8192, 32, 32, 32) | {"sliding_window": 2047},
        "14b": preset(BASE, 5120, 17920, 40, 40, 10)
        | {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000.0, "pad_token_id": None},
    }

    def layer(self, config: Phi3Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        return ()
