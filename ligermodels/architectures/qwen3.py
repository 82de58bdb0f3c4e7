"""Qwen3: Qwen2 without QKV biases, with per-head QK-norm and its own head_dim."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SwitchedWindowConfig
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Qwen3Config(SwitchedWindowConfig):
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768


BASE = {"model_type": "qwen3", "head_dim": 128}
HUB = BASE | {"rope_theta": 1000000.0, "max_position_embeddings": 40960, "bos_token_id": 151643, "eos_token_id": 151645}
TIED = HUB | {"tie_word_embeddings": True}


class Qwen3(CausalLM):
    Config = Qwen3Config
    hub_class = "Qwen3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 64},
        "0.6b": preset(TIED, 1024, 3072, 28, 16, 8),
        "1.7b": preset(TIED, 2048, 6144, 28, 16, 8),
        "4b": preset(TIED, 2560, 9728, 36, 32, 8),
        "8b": preset(HUB, 4096, 12288, 36, 32, 8),
    }

    def layer(self, config: Qwen3Config, index: int) -> DecoderLayer:
        attention = QKNormAttention(config, **config.attention_biases, window=config.window(index))
        return DecoderLayer(config, attention, GatedMLP(config))
