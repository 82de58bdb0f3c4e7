"""Gemma 2B and 7B: Llama with GeGLU, RMSNorm with weight + 1, and tied embeddings scaled by sqrt(hidden_size)."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.text_models import GemmaConfig
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.gemma import gemma_block

BASE = {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 256}
HUB = BASE | {"vocab_size": 256000, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


class Gemma(CausalLM):
    Config = GemmaConfig
    hub_class = "GemmaForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"num_key_value_heads": 1, "head_dim": 32},
        "2b": preset(HUB, 2048, 16384, 18, 8, 1),
        "7b": preset(HUB, 3072, 24576, 28, 16, 16),
    }

    def layer(self, config: GemmaConfig, index: int) -> DecoderLayer:
        return gemma_block(config)
