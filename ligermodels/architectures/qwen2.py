"""Qwen1.5, Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen: Llama with QKV biases and an optional window in upper layers."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SwitchedWindowConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Qwen2Config(SwitchedWindowConfig):
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768


BASE = {"model_type": "qwen2", "rms_norm_eps": 1e-6}
QWEN_2_5 = BASE | {"rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151643}


class Qwen2(CausalLM):
    Config = Qwen2Config
    hub_class = "Qwen2ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE),
        "0.5b": preset(QWEN_2_5, 896, 4864, 24, 14, 2) | {"vocab_size": 151936, "tie_word_embeddings": True},
        "1.5b": preset(QWEN_2_5, 1536, 8960, 28, 12, 2) | {"vocab_size": 151936, "tie_word_embeddings": True},
        "7b": preset(QWEN_2_5, 3584, 18944, 28, 28, 4) | {"vocab_size": 152064},
    }

    def layer(self, config: Qwen2Config, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=True, window=config.window(index))
        return DecoderLayer(config, attention, GatedMLP(config))
