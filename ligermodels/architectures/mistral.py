"""Mistral 7B v0.1 to v0.3, Nemo, Devstral: Llama, with a sliding window in every layer (v0.1) or its own head_dim."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.text_models import MistralConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP

BASE = {"model_type": "mistral", "rms_norm_eps": 1e-5}
V0_3 = BASE | {"sliding_window": None, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2}


class Mistral(CausalLM):
    Config = MistralConfig
    hub_class = "MistralForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"sliding_window": 128},
        "7b": preset(V0_3, 4096, 14336, 32, 32, 8) | {"vocab_size": 32768, "max_position_embeddings": 32768},
        "nemo-12b": preset(V0_3, 5120, 14336, 40, 32, 8) | {"vocab_size": 131072, "head_dim": 128},
        "24b": preset(V0_3, 5120, 32768, 40, 32, 8)
        | {"vocab_size": 131072, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1000000000.0}
        | {"pad_token_id": 11},
    }

    def layer(self, config: MistralConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))
