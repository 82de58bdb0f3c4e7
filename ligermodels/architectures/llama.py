"""Llama 2, 3, 3.1 and 3.2, SmolLM2, DeepSeek-R1-Distill-Llama: pre-norm RMSNorm, GQA, RoPE, SwiGLU."""

from typing import ClassVar

from ligermodels.configs.base import Config, preset, tiny
from ligermodels.configs.rope import LLAMA3_ROPE
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP

BASE = {"model_type": "llama", "rms_norm_eps": 1e-5}
LLAMA_3 = BASE | {"vocab_size": 128256, "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001}
SMOLLM_2 = BASE | {"vocab_size": 49152, "rope_theta": 100000.0, "bos_token_id": 0, "eos_token_id": 0}
LLAMA_3_1 = LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": LLAMA3_ROPE}
LLAMA_3_2 = LLAMA_3_1 | {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}}


class Llama(CausalLM):
    hub_class = "LlamaForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE),
        "135m": preset(SMOLLM_2, 576, 1536, 30, 9, 3)
        | {"max_position_embeddings": 8192, "tie_word_embeddings": True, "initializer_range": 1 / 24},
        "1b": preset(LLAMA_3_2, 2048, 8192, 16, 32, 8) | {"head_dim": 64},
        "3b": preset(LLAMA_3_2, 3072, 8192, 28, 24, 8) | {"head_dim": 128},
        "2-7b": preset(BASE, 4096, 11008, 32, 32, 32) | {"max_position_embeddings": 4096},
        "8b": preset(LLAMA_3, 4096, 14336, 32, 32, 8) | {"max_position_embeddings": 8192},
        "70b": preset(LLAMA_3_1, 8192, 28672, 80, 64, 8),
    }

    def layer(self, config: Config, index: int) -> DecoderLayer:
        attention = Attention(config, **config.attention_biases)
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.mlp_bias))
