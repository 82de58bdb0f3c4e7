"""Ministral 3 and Devstral 2: Mistral with YaRN and queries that grow with their position."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.text_models import SCALED_YARN, Ministral3Config
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP

BASE = {"model_type": "ministral3", "rope_parameters": SCALED_YARN}
DEVSTRAL_YARN = SCALED_YARN | {
    "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 4.0, "mscale_all_dim": 0.0,
    "llama_4_scaling_beta": 0.0,
}  # fmt: skip
HUB = BASE | {"bos_token_id": 1, "eos_token_id": 2}


class Ministral3(CausalLM):
    Config = Ministral3Config
    hub_class = "Ministral3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE)
        | {"head_dim": 32, "rope_parameters": SCALED_YARN | {"factor": 4.0, "original_max_position_embeddings": 128}},
        "3b": preset(HUB, 3072, 9216, 26, 32, 8) | {"tie_word_embeddings": True},
        "8b": preset(HUB, 4096, 14336, 34, 32, 8),
        "14b": preset(HUB, 5120, 16384, 40, 32, 8),
        "123b": preset(HUB, 12288, 28672, 88, 96, 8) | {"rope_parameters": DEVSTRAL_YARN},
    }

    def layer(self, config: Ministral3Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))
