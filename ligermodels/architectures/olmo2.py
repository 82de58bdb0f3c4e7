"""OLMo 2: Llama with RMSNorm after each branch instead of before it, and QK-norm over all heads together."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import Config, preset, tiny
from ligermodels.layers.attention import JointQKNormAttention
from ligermodels.layers.block import PostNormLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Olmo2Config(Config):
    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1


BASE = {"model_type": "olmo2", "rms_norm_eps": 1e-6}
HUB = BASE | {"vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000.0, "pad_token_id": 100277}


class Olmo2(CausalLM):
    Config = Olmo2Config
    hub_class = "Olmo2ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"pad_token_id": None},
        "1b": preset(HUB, 2048, 8192, 16, 16, 16),
        "7b": preset(HUB, 4096, 11008, 32, 32, 32),
    }

    def layer(self, config: Olmo2Config, index: int) -> PostNormLayer:
        return PostNormLayer(config, JointQKNormAttention(config, **config.attention_biases), GatedMLP(config))
