"""SmolLM3: Llama without RoPE (NoPE) in every fourth layer."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class SmolLM3Config(SlidingWindowConfig):
    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 128004
    use_sliding_window: bool = False
    no_rope_layers: tuple[int, ...] | None = None  # despite its name, 1 means that the layer has RoPE
    no_rope_layer_interval: int = 4

    default_rope_theta = 2_000_000.0

    def validate(self) -> None:
        super().validate()
        self.check_one_per_layer("no_rope_layers")

    def has_rope(self, layer: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def is_sliding(self, layer: int) -> bool:
        return self.use_sliding_window and not self.has_rope(layer)


BASE = {"model_type": "smollm3", "rms_norm_eps": 1e-6}
HUB = BASE | {"rope_theta": 5000000.0, "max_position_embeddings": 65536, "pad_token_id": 128004}


class SmolLM3(CausalLM):
    Config = SmolLM3Config
    hub_class = "SmolLM3ForCausalLM"
    SIZES: ClassVar = {"tiny": tiny(BASE) | {"pad_token_id": None}, "3b": preset(HUB, 2048, 11008, 36, 16, 4)}

    def layer(self, config: SmolLM3Config, index: int) -> DecoderLayer:
        rope = FULL_ATTENTION if config.has_rope(index) else None
        attention = Attention(config, **config.attention_biases, window=config.window(index), rope=rope)
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.mlp_bias))
