"""OLMo 3: OLMo 2 with three sliding-window layers to one full-attention layer, and YaRN only in the latter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import Rope, read_ropes_by_layer_type
from ligermodels.layers.attention import JointQKNormAttention
from ligermodels.layers.block import PostNormLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Olmo3Config(SlidingWindowConfig):
    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    sliding_window: int | None = 4096

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        return read_ropes_by_layer_type(raw, 500_000.0, 500_000.0)


BASE = {"model_type": "olmo3", "rms_norm_eps": 1e-6}
HUB = BASE | {"vocab_size": 100278, "max_position_embeddings": 65536, "pad_token_id": 100277}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}


class Olmo3(CausalLM):
    Config = Olmo3Config
    hub_class = "Olmo3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"pad_token_id": None, "sliding_window": 128},
        "7b": preset(HUB, 4096, 11008, 32, 32, 32) | {"rope_scaling": YARN},
        "32b": preset(HUB, 5120, 27648, 64, 40, 8) | {"rope_scaling": YARN},
    }

    def layer(self, config: Olmo3Config, index: int) -> PostNormLayer:
        attention = JointQKNormAttention(
            config, **config.attention_biases, window=config.window(index), rope=config.layer_type(index)
        )
        return PostNormLayer(config, attention, GatedMLP(config))
